"""Loading a tokenizer: CPU time and memory from the start of a process to the first render.

Each load runs in its own process. For transformers and fastokens it loads only the tokenizer and encodes once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from rich.progress import Progress

from bench.report import ROOT, Block, table, where
from bench.timing import Spent

ROUNDS, QUICK_ROUNDS = 5, 1

_START = """
import json, sys, time
from tests.assets import family_dir
family, text = sys.argv[1], "What leaks here?"
path = str(family_dir(family))
began = time.process_time()
"""
_END = """
status = open("/proc/self/status").read().split("VmRSS:")[1].split()[0]
print(json.dumps([time.process_time() - began, int(status) / 1024]))
"""
_OURS = """
import tokentrace
renderer = tokentrace.create_renderer(path)
renderer.render([{"role": "user", "content": text}], add_generation_prompt=True)
"""
WAYS = {
    "tokentrace": _OURS,
    "– create_renderer alone": "import tokentrace\nrenderer = tokentrace.create_renderer(path)\n",
    "– with fastokens loaded": _OURS + "renderer.tokenizer.warm_up()\n",
    "– a pool of 16, each rendering": """
import tokentrace
pool = tokentrace.create_renderer_pool(path, size=16)
held = [pool.checkout() for _ in range(16)]
for one in held:
    one.__enter__().render([{"role": "user", "content": text}], add_generation_prompt=True)
""",
    "transformers": "from bench.rivals import transformers_tokenizer\ntransformers_tokenizer(family).encode(text)\n",
    "transformers + fastokens": (
        "from bench.rivals import transformers_tokenizer\ntransformers_tokenizer(family, fast=True).encode(text)\n"
    ),
    "fastokens alone": "import fastokens\nfastokens.Tokenizer.from_file(path + '/tokenizer.json').encode(text)\n",
    "tokenizers alone": "import tokenizers\ntokenizers.Tokenizer.from_file(path + '/tokenizer.json').encode(text)\n",
}


def measure(family: str, way: str, cache: str) -> tuple[float, float]:
    """Seconds of CPU time and MiB of one way of loading."""
    # modules are compiled beforehand, as pip does when it installs
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": cache}
    code = _START + WAYS[way] + _END
    process = subprocess.run(
        [sys.executable, "-c", code, family], env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    )
    spent, memory = json.loads(process.stdout.splitlines()[-1])
    return spent, memory


def run(families: Sequence[str], rounds: int, progress: Progress) -> list[Block]:
    """Measure, and return the blocks of the report."""
    load = os.getloadavg()[0]
    spent: dict[tuple[str, str], Spent] = {}
    memory: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as cache:
        for family in families:
            measure(family, "tokentrace", cache)  # compiles all modules
            for _ in progress.track(range(rounds), description=f"{family}: loading"):
                for way in WAYS:
                    seconds, memory[family, way] = measure(family, way, cache)
                    spent.setdefault((family, way), Spent()).values.append(seconds)
    heads = ["", *(f"{family}: {unit}" for family in families for unit in ("s", "MiB"))]
    rows = [
        [way, *(cell for one in families for cell in (f"{spent[one, way].median:.2f}", f"{memory[one, way]:.0f}"))]
        for way in WAYS
    ]
    note = "Seconds of CPU time, medians, and memory of the process."
    return [Block("load", "\n\n".join([note, table(heads, rows), where(load)]))]
