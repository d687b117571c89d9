"""verl: a dataset for its SFT trainer."""

import functools
import json
import warnings
from collections.abc import Mapping
from typing import Any

try:
    import numpy as np
    import torch
    from omegaconf import OmegaConf
    from torch.utils.data import Dataset
    from verl.utils import hf_tokenizer
    from verl.utils.fs import copy_local_path_from_hdfs
except ImportError as error:
    raise ImportError(f"this needs verl: pip install 'verl[verl-core]' ({error})") from error

from ..data.conversations import Columns, conversation_of, plain_values, without_nulls
from ..data.sources import pyarrow
from ..errors import InputError, SampleError, brief
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from ..samples.supervised import build_supervised_sample
from .rows import ids_and_mask

_PAD_MODES = ("right", "no_padding")
_CUTS = ("error", "left", "right")
_SAMPLE = ("turns", "parts", "roles", "past", "final_stop")


class SFTDataset(Dataset):  # type: ignore[type-arg]
    """Rows for verl's SFT trainer, with the settings of ``data.tokentrace``."""

    def __init__(
        self, parquet_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        setting = (config or {}).get
        if processor is not None:
            raise InputError("images are not supported: use a model without a processor")
        self.tokenizer = hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.pad_mode, self.truncation = setting("pad_mode", "right"), setting("truncation", "error")
        for name, choices in (("pad_mode", _PAD_MODES), ("truncation", _CUTS)):
            if (value := getattr(self, name)) not in choices:
                raise InputError(f"data.{name} must be one of {', '.join(choices)}, not {value!r}")
        self.max_length = int(setting("max_length", 1024))
        self._messages, self._tools = setting("messages_key", "messages"), setting("tools_key", "tools")
        self._media = setting("image_key", "images"), setting("video_key", "videos")
        self._thinking = setting("enable_thinking_key", "enable_thinking")
        default = setting("enable_thinking_default")
        self._thinking_default = None if default == "none" else _switch(default)  # verl's default
        ours = plain(setting("tokentrace"))
        self._sample = {key: ours.pop(key) for key in _SAMPLE if key in ours}
        self._renderer = {**ours, **plain(setting("apply_chat_template_kwargs"))}
        self.rows = _rows(parquet_files, max_samples, setting("shuffle"), setting("seed"))

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        [row] = self.rows.slice(range(len(self))[item], 1).to_pylist()
        if row.get("input_ids") is None:
            ids, mask = self._built(row)
        elif self._sample or self._renderer:
            raise InputError("rows of ids are rendered: leave out data.tokentrace and template variables")
        else:
            ids, mask = ids_and_mask(row)
        columns: dict[str, Any] = {"input_ids": ids, "position_ids": np.arange(len(ids)), "loss_mask": mask}
        if len(ids) > self.max_length:
            columns = {name: self._cut(item, values) for name, values in columns.items()}
        if not columns["loss_mask"].any():
            what = "truncation removed everything with loss" if mask.any() else "nothing in it carries loss"
            warnings.warn(f"row {item}: {what}", stacklevel=2)
        tensors = {name: torch.from_numpy(values.astype(np.int64)) for name, values in columns.items()}
        if self.pad_mode == "no_padding":
            return tensors
        tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
        pad, missing = self.tokenizer.pad_token_id or 0, self.max_length - len(tensors["input_ids"])
        return {
            name: torch.nn.functional.pad(value, (0, missing), value=pad if name == "input_ids" else 0)
            for name, value in tensors.items()
        }

    def _built(self, row: Mapping[str, Any]) -> tuple[Any, Any]:
        for column in self._media:
            if row.get(column):
                raise InputError("images and videos are not supported", field=column)
        thinking = _switch(row.get(self._thinking))
        thinking = self._thinking_default if thinking is None else thinking
        variables = {} if thinking is None else {"enable_thinking": thinking}
        names = (self._messages, self._tools)
        row = {name: without_nulls(row[name]) for name in names if row.get(name) is not None}
        if self._messages not in row:
            raise InputError("there are no messages: set data.messages_key", field=self._messages)
        columns = Columns(messages=self._messages, tools=self._tools if self._tools in row else None)
        chat = conversation_of(row, columns)
        renderer = renderer_of(self.tokenizer, {**self._renderer, **variables})
        sample = build_supervised_sample(renderer, chat.messages, tools=chat.tools, **self._sample)
        return sample.ids, sample.mask

    def _cut(self, item: int, values: Any) -> Any:
        if self.truncation == "error":
            problem = f"row {item} has {len(values)} tokens, more than data.max_length, {self.max_length}"
            raise SampleError(f"{problem}: raise it, or set data.truncation to left or right")
        return values[-self.max_length :] if self.truncation == "left" else values[: self.max_length]


def _rows(files: Any, limit: int, shuffle: bool | None, seed: int | None) -> Any:
    names = [files] if isinstance(files, str) else list(files)
    read = pyarrow("pyarrow.parquet").read_table
    tables = [read(copy_local_path_from_hdfs(name)) for name in names]
    table = pyarrow().concat_tables(tables, promote_options="permissive")
    if not 0 < limit < table.num_rows:
        return table
    if not shuffle:
        return table.slice(0, limit)
    return table.take(np.random.default_rng(seed).choice(table.num_rows, size=limit, replace=False))


def _switch(value: Any) -> bool | None:
    """None if unset. Raises InputError for text: "false" would count as true."""
    if value is not None and value not in (True, False):
        raise InputError(f"must be true or false, not {brief(value)}", field="enable_thinking")
    return None if value is None else bool(value)


def renderer_of(tokenizer: Any, settings: Mapping[str, Any]) -> Renderer:
    """A cached renderer for verl's tokenizer."""
    return _renderer(tokenizer, str(tokenizer.chat_template), json.dumps(settings, sort_keys=True))


@functools.lru_cache(maxsize=16)
def _renderer(tokenizer: Any, _template: str, settings: str) -> Renderer:
    return create_renderer(tokenizer, **json.loads(settings))


def plain(value: Any) -> Any:
    """Return settings or columns as plain values, and {} for None."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    return {} if value is None else plain_values(value.tolist() if hasattr(value, "tolist") else value)
