"""Does the model that was loaded speak? A known one counts on before the port opens (read `health.py` for later checks).

A damaged file, a wrong kernel or rotation of positions gives fluent rubbish, or none, without any error. What a language model
writes after "1, 2, 3, …" is known without running it, so there is nothing to be recorded and nothing to be out of date. Which models
are asked is the table below: those that have been seen to count, at every precision of keys and values but the 4-bit one.
"""

from __future__ import annotations

from pathlib import Path

from martlet.engine.build import Built
from martlet.engine.driver import Driver
from martlet.engine.prompts import PromptTokens
from martlet.engine.requests import RequestMaker
from martlet.errors import MartletError

__all__ = ["COUNTING", "EXPECTED", "check_model"]

COUNTING, EXPECTED = "1, 2, 3, 4, 5, 6, 7, 8,", " 9, 10, 11, 12"
TOKENS = 16
COUNTS = {("SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432)}  # name and bytes of the file


def check_model(built: Built) -> bool:
    """Whether the model is a known one, which has counted; if it does not, it is closed, and MartletError says so."""
    config, path = built.config, Path(built.config.model)
    if (path.name, path.stat().st_size) not in COUNTS or "q4" in config.kv_dtype or config.backend == "null":
        return False
    prompt = PromptTokens(built.tokenizer.encode(COUNTING), COUNTING)
    asked = RequestMaker(built).asked("self-test", prompt, {"max_tokens": TOKENS, "temperature": 0.0})
    driver = Driver(built.engine, built.tokenizer)
    try:
        [output] = driver.run([asked])
    finally:
        driver.close()
    found = output.error or output.outputs[0].text
    if not found.startswith(EXPECTED):
        built.close()
        raise MartletError(
            f"{path.name} does not answer as it should: after {COUNTING!r} it wrote {found!r:.120}, expected {EXPECTED!r}. Its file"
            " may be damaged: fetch it again. --no-self-test serves it as it is."
        )
    return True
