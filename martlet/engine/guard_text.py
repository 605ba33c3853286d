"""A text to measure KV types on where nobody gives one: prose, talk, code, JSON and figures, as users' texts mix them.

Written for this file. What is measured on it depends on its every byte (`kv_guard.py`), so it is not to be tidied.
"""

from __future__ import annotations

__all__ = ["GUARD_TEXT"]

GUARD_TEXT = '''\
The lighthouse at Varn had been dark for eleven winters when the council sent a clerk to write down what was left of it.
She came in the second week of October, on the boat that brought flour and lamp oil to the farms along the sound, and she
had with her a folding table, two ledgers, a tape of waxed linen and a letter that nobody asked to see. The keeper's
cottage still had its roof. In the kitchen a kettle stood on the range as if somebody had only gone out to look at the
weather; there were cups on their hooks, seven of them, and an eighth on the sill with a dead wasp in it. She counted the
cups, wrote "cups, 8, one chipped", and went on to the spoons.

On the third evening the wind turned. It had blown from the land since she came, dry and steady, and she had grown used to
the sound of it in the chimney; now it came from the sea in long pushes, with a silence after each that was worse than the
noise. She took the lantern and climbed the hundred and forty-two steps to the lamp room, because she had counted them on
the first day and wanted to know whether there would be as many in the dark. There were. The great lens stood under its
cloth. When she drew the cloth away, the lantern's flame came back to her from every ring of the glass, smaller and smaller,
until the last of them was no more than a spark, and she understood why the old keeper had written in his log, year after
year, that he did not sleep well and did not mind it.

"You could light it," said the boatman the next day. "There's oil."
"It isn't on my list," she said.
"What is on your list?"
She read it to him: doors, windows, cups, spoons, the clock, the lens, the rope in the shed. He listened with his head on
one side. "And which of those," he asked, "is the lighthouse?"

# How the tower's range follows from its height

An observer whose eye is h metres above the sea sees the horizon at about 3.57 times the square root of h kilometres. A
lamp 42 m up is therefore seen from 3.57 * 6.48 = 23.1 km by an eye at the water, and by a sailor on a deck 4 m high from
another 3.57 * 2 = 7.1 km, which makes 30.2 km or 16.3 nautical miles. Refraction adds some eight per cent; fog takes away
far more than that. The following table was made in 1887 and agrees with the formula to within a tenth of a mile.

| height (m) | range (km) | range (nm) |
|-----------:|-----------:|-----------:|
|         10 |       11.3 |        6.1 |
|         20 |       16.0 |        8.6 |
|         42 |       23.1 |       12.5 |
|         60 |       27.7 |       14.9 |

```python
from math import sqrt


def horizon_km(height_m: float) -> float:
    """Distance to the horizon for an eye at this height above the sea."""
    if height_m < 0:
        raise ValueError(f"height is {height_m}; expected 0 or more")
    return 3.57 * sqrt(height_m)


def lamp_range_km(lamp_m: float, eye_m: float = 4.0) -> float:
    return horizon_km(lamp_m) + horizon_km(eye_m)


for name, lamp in {"Varn": 42, "Holm": 31, "Skarv": 18}.items():
    print(f"{name:>6}: {lamp_range_km(lamp):5.1f} km")
```

User: Which of the three lights can be seen from a deck 4 m high at a distance of 25 km? Answer with a call of the tool.
Assistant: Varn is seen from 30.2 km, Holm from 27.0 km and Skarv from 22.3 km, so two of them are in range.
{"name": "report_visible_lights", "arguments": {"distance_km": 25, "eye_height_m": 4.0, "lights": [{"name": "Varn",
"range_km": 30.2, "visible": true}, {"name": "Holm", "range_km": 27.0, "visible": true}, {"name": "Skarv", "range_km": 22.3,
"visible": false}]}}
User: And if the deck were 9 m high?
Assistant: Then the eye adds 3.57 * 3 = 10.7 km instead of 7.1 km. Skarv is seen from 15.1 + 10.7 = 25.8 km: all three.

In the spring the council voted, nine to four, to let the tower stand. The clerk's report ran to thirty-one pages, of which
the last held a single line. It said that the lens was sound, that the oil was good, that the rope in the shed would bear a
man's weight, and that on the night of the fourteenth of October, between nine and half past ten, a light had been shown at
Varn, for which no charge was made.
'''
