"""Make `tieredkv/bench/data/python_docs_sharegpt.json`: conversations in ShareGPT's format about Python's own library.

The text is that of the docstrings of the Python standard library (PSF License Version 2, which permits this), each
question quoting one and each answer another of the same module. Run it with the Python whose text is wanted:

    python scripts/make_sharegpt.py > tieredkv/bench/data/python_docs_sharegpt.json
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import sys

MODULES = """
abc argparse array ast asyncio base64 bisect calendar cmath codecs collections configparser contextlib copy csv ctypes
dataclasses datetime decimal difflib dis email.message enum fileinput fnmatch fractions functools gettext glob gzip
hashlib heapq hmac html http.client importlib.util inspect io ipaddress itertools json locale logging lzma mailbox math
mimetypes multiprocessing netrc numbers operator optparse os os.path pathlib pdb pickle pickletools platform plistlib
posixpath pprint profile queue random re reprlib sched secrets selectors shelve shlex shutil signal smtplib socket
sqlite3 ssl statistics string struct subprocess sys sysconfig tarfile tempfile textwrap threading time timeit tokenize
trace traceback tracemalloc types typing unicodedata unittest urllib.parse urllib.request uuid warnings wave weakref
xml.dom.minidom xml.etree.ElementTree zipfile zipimport zlib
"""
TASKS = (
    "Explain in your own words what the following part of Python's library does, and when one would use it.",
    "I am reading the documentation of a Python module. What should I know before I use this in a service?",
    "Write a short example for this function of Python's standard library, and say what could go wrong.",
    "Review this piece of documentation: what is unclear, and what would you add?",
)


def documented(name: str) -> list[tuple[str, str]]:
    """(name, docstring) of what a module defines, with enough text to talk about."""
    module = importlib.import_module(name)
    found = {}
    for member, value in sorted(vars(module).items()):
        if member.startswith("_") or not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        text = inspect.getdoc(value) or ""
        if 500 <= len(text) <= 6000 and text.isascii():
            found[text] = f"{name}.{member}"
    return [(name, text) for text, name in found.items()]


def main() -> None:
    rng = random.Random(1)
    conversations = []
    for module in MODULES.split():
        entries = documented(module)
        for i, (name, text) in enumerate(entries[:4]):
            answer_name, answer = entries[(i + 1) % len(entries)]
            question = f"{rng.choice(TASKS)}\n\n{name}\n\n{text}"
            conversations.append(
                {
                    "id": name,
                    "conversations": [
                        {"from": "human", "value": question},
                        {"from": "gpt", "value": f"Compare it with {answer_name}. {answer[:900]}"},
                        {"from": "human", "value": "And in one sentence?"},
                        {"from": "gpt", "value": text.split(". ")[0]},
                    ],
                }
            )
    json.dump(conversations, sys.stdout, indent=1)
    print()
    print(f"{len(conversations)} conversations", file=sys.stderr)


if __name__ == "__main__":
    main()
