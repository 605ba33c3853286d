"""Texts to compare tokenizers on, made from a seed: prose in many scripts, code, noise from every
part of Unicode.
"""

from __future__ import annotations

import random
import unicodedata
from functools import cache

SAMPLES = [
    "The quick brown fox doesn't jump over 12345 lazy dogs; they'd rather sleep, wouldn't THEY'LL?",
    "Führer Cửa Việt naïve café ŁÓDŹ Ærøskøbing þorn ſtaff KÄSE ﬁne",
    "Привет, как дела? Это — тест; ёлка №5.",
    "Γειά σου Κόσμε, ΟΔΥΣΣΕΑΣ ἄνθρωπος",
    "你好，世界！这是一个测试。今天是2024年1月15日，星期一。",
    "こんにちは、世界。カタカナとひらがな、ﾊﾝｶｸ。",
    "안녕하세요 세계, 한국어 테스트입니다.",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣٤",
    "שלום עולם, מה שלומך?",
    "नमस्ते दुनिया, यह एक परीक्षा है। १२३",
    "สวัสดีชาวโลก ทดสอบภาษาไทย",
    "🚀 (normal) 😶‍🌫️ (multiple emojis) ✅ 🦙🦙 👩‍👩‍👧‍👦 🇫🇷",
    "def f(x: int) -> list[str]:\n    return [f'{i:03d}' for i in range(x)]  # comment\n\n\n\tif a != b:\n\t\tpass\r\n",
    '{"key": [1, 2.5e-10, null, true], \'other\': "\\u00e9"}',
    '<div class="a">&nbsp;</div><!-- <|not_a_token|> <0x41> [INST] -->',
    "https://example.org/a/b?c=d&e=%20#frag user@mail.example 192.168.0.1 3.14159 1,000,000 0x1F",
    "   leading and trailing   \n\n \t \n",
    "\t\t\ttabs\t\tand  double  spaces   triple    four",
    "I'm YOU'RE we'Ve He'S it'LL I'd 'tis rock'n'roll 's 't ''' \"quoted\"",
    "a\u0301e\u0300 \u200b\u200d\ufeff \u00a0\u2003\u3000x\u2028y\u0085z\x1c\x00\x7f",
    "ALLCAPS CamelCase snake_case kebab-case SCREAMING_SNAKE mixedCASEWord ǅungla ʰ ª",
    "H2O x² ½ ⅷ ² ① ٣٤٥ 12³ 1000000000000",
    "$€£ +−×÷=<>^|~` §¶•…—–‘’“”«»",
    "a_b-c*d/e//f\\g!!!???... ---=== ###\n#### heading\n\n* item\n\n\n\nend",
]
SEPARATORS = ["", " ", "  ", "\n", "\n\n", "\t", "\r\n", ", ", ".", "'", "\u00a0", " \n "]


@cache
def by_category() -> list[str]:
    """Assigned characters, a string a general category (those of the interpreter's Unicode, which
    oracles know too).
    """
    by_category: dict[str, list[str]] = {}
    for code in range(0x110000):
        char = chr(code)
        category = unicodedata.category(char)
        if category not in ("Cn", "Cs", "Co"):
            by_category.setdefault(category, []).append(char)
    return ["".join(chars) for chars in by_category.values()]


def random_text(rng: random.Random) -> str:
    """Up to some thirty pieces: words of samples, runs of one character, characters of a
    category.
    """
    pieces: list[str] = []
    for _ in range(rng.randint(1, 30)):
        u = rng.random()
        if u < 0.5:
            sample = rng.choice(SAMPLES)
            start = rng.randrange(len(sample))
            pieces.append(sample[start : start + rng.randint(1, 24)])
        elif u < 0.65:
            pieces.append(rng.choice(" \n\t\ra1A.'é你▁") * rng.randint(1, 9))
        elif u < 0.85:
            chars = rng.choice(by_category())
            pieces.append("".join(rng.choice(chars) for _ in range(rng.randint(1, 5))))
        else:
            pieces.append("".join(chr(rng.randint(32, 126)) for _ in range(rng.randint(1, 8))))
        pieces.append(rng.choice(SEPARATORS))
    return "".join(pieces)


@cache
def corpus(seed: int = 7, n: int = 400) -> tuple[str, ...]:
    """The samples, their concatenation, and `n` random texts."""
    rng = random.Random(seed)
    return (*SAMPLES, "\n".join(SAMPLES), "", *(random_text(rng) for _ in range(n)))
