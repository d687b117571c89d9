"""The pocket model: its NumPy forward matches transformers, however sequences are batched, cut and continued."""

import asyncio
import os
from functools import cache
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: no request leaves the machine

import numpy as np
import pytest

from tests.lazy import lazy
from tests.support import FULL, rotating
from tokentrace import InputError, create_renderer
from tokentrace.demo.paths import TRIALS, ClientPath, run_path
from tokentrace.demo.questions import question_task
from tokentrace.engines.embedded import EmbeddedEngine
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import load_pocket, log_softmax, read_safetensors
from training.pocket.expert import solve
from training.pocket.questions import make_questions

torch, transformers = lazy("torch"), lazy("transformers")

CLOSE = 1e-4


@cache
def reference() -> Any:
    return transformers.Qwen3ForCausalLM.from_pretrained(str(POCKET), dtype=torch.float32, local_files_only=True).eval()


@cache
def rows() -> list[list[int]]:
    """Ids of a conversation of each kind, and random ids."""
    renderer = create_renderer(POCKET)
    random = np.random.default_rng(0).integers(0, 4096, 40).tolist()
    questions = make_questions(9, 12, "held_back")
    return [renderer.render_ids(solve(question), tools=question.tools) for question in questions] + [random]


# -- what ships


def test_the_weights_are_small_and_the_folder_loads() -> None:
    assert (POCKET / "model.safetensors").stat().st_size < 8_000_000
    model = transformers.Qwen3ForCausalLM.from_pretrained(str(POCKET), local_files_only=True)
    assert model.dtype == torch.float16
    assert model.config.tie_word_embeddings
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(POCKET), local_files_only=True)
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    for config in (model.config, transformers.GenerationConfig.from_pretrained(str(POCKET))):
        assert {name: getattr(config, f"{name}_token_id") for name in ids} == ids
    assert create_renderer(POCKET).get_stop_token_ids() == [ids["eos"]]
    assert model.config.vocab_size == len(tokenizer)


def test_every_weight_is_read_as_transformers_reads_it() -> None:
    ours = read_safetensors(POCKET / "model.safetensors")
    theirs = reference().state_dict()
    assert set(theirs) - set(ours) == {"lm_head.weight"}  # tied
    for name, weight in ours.items():
        assert np.array_equal(weight, theirs[name].numpy()), name


# -- the forward


@pytest.mark.parametrize("index", rotating(range(13), "logprobs", 3))
def test_logprobs_are_those_of_transformers(index: int) -> None:
    ids = rows()[index]
    with torch.inference_mode():
        logits = reference()(torch.tensor([ids])).logits[0]
    expected = torch.log_softmax(logits.double(), -1).numpy()
    scored = load_pocket().score(ids)
    assert scored.dtype == np.float32
    assert np.abs(scored - expected[np.arange(len(ids) - 1), ids[1:]]).max() < CLOSE
    model = load_pocket()
    (logits,) = model.extend([model.new_cache()], [ids], every=True)
    likely = expected > -20
    assert np.abs(log_softmax(logits) - expected)[likely].max() < CLOSE


def test_batches_and_single_steps_give_the_same_as_single_prompts() -> None:
    model = load_pocket()
    ids, cache = rows()[0][:60], model.new_cache(1)
    (at_once,) = model.extend([model.new_cache()], [ids], every=True)
    steps = np.concatenate([model.extend([cache], [[token]]) for token in ids])
    assert np.abs(log_softmax(steps) - log_softmax(at_once)).max() < CLOSE
    caches = [model.new_cache() for _ in rows()]
    prompts = model.extend(caches, rows())
    singles = [model.new_cache() for _ in rows()]
    alone = [model.extend([cache], [ids]) for cache, ids in zip(singles, rows(), strict=True)]
    assert np.abs(log_softmax(prompts) - log_softmax(np.concatenate(alone))).max() < CLOSE
    for step in range(5):  # then token by token, batched and alone
        tokens = [[(17 * at + step) % 4096] for at in range(len(caches))]
        together = log_softmax(model.extend(caches, tokens))
        alone = [model.extend([cache], [ids]) for cache, ids in zip(singles, tokens, strict=True)]
        assert np.abs(together - log_softmax(np.concatenate(alone))).max() < CLOSE


@pytest.mark.parametrize("cut", [1, 100, 255, 256, 257])
def test_a_reused_prefix_gives_the_same_as_a_new_start(cut: int) -> None:
    model = load_pocket()
    ids = max(rows(), key=len)
    expected = model.extend([model.new_cache()], [ids])
    whole = model.new_cache(16)
    model.extend([whole], [ids])
    copied = whole.copy(cut)
    assert (copied.length, whole.length) == (cut, len(ids))
    whole.truncate(cut)
    for prefix in (copied, whole):
        continued = model.extend([prefix], [ids[cut:]])
        assert np.abs(log_softmax(continued) - log_softmax(expected)).max() < CLOSE
    model.extend([copied], [[1, 2, 3]])
    assert whole.length == len(ids) == copied.length - 3


def test_bad_input_is_refused_and_changes_nothing() -> None:
    model = load_pocket()
    cache = model.new_cache()
    model.extend([cache], [[1, 2, 3]])
    for caches, ids, problem in (
        ([cache], [[4096]], "outside of the vocabulary"),
        ([cache], [[-1]], "outside of the vocabulary"),
        ([cache], [[]], "at least one number"),
        ([cache], [[1.5]], "at least one number"),
        ([cache], [], "0 sequences of ids for 1 caches"),
        ([], [], "give one for each"),
        ([cache, cache], [[1], [2]], "given twice"),
        ([cache], [[1] * 4094], "4097 tokens are more than 4096"),
    ):
        with pytest.raises(InputError, match=problem):
            model.extend(caches, ids)
    for call in (cache.truncate, cache.copy):
        with pytest.raises(InputError, match="3 tokens"):
            call(4)
    assert cache.length == 3


# -- what it can do


def test_pocket_solves_held_back_questions() -> None:
    """Greedily, with its tools, over several turns: at least four in five."""
    tasks = [question_task(question) for question in make_questions(424242, 60 if FULL else 25, "held_back")]
    report = asyncio.run(run_path(ClientPath.TOKENTRACE, tasks, TRIALS[1], EmbeddedEngine()))
    assert report.numbers()["solved"] >= 0.8
