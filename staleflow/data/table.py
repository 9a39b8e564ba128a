"""Prompts from the user's own jsonl or parquet file.

Invariants: the whole file is read and checked before anything starts, so that a bad line is found at once and
named; `prompt_id` is the row's index. Options (`data.options`): `held_out_path`, the file evaluated on, and
`metadata_columns`, columns handed to the verifier under their own names.

A column may be nested, written with dots: `reward_model.ground_truth`. A prompt is a text, or a list of chat
messages `{"role", "content"}`: these go through the model's chat template if it has one, else their contents
are joined by blank lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from staleflow.data.names import nearest
from staleflow.data.tokenizers import ChatTokenizer, Tokenizer
from staleflow.data.trajectory import Prompt
from staleflow.errors import ConfigError, DataError

Row = tuple[str, Mapping[str, Any]]
"""Where it stands, for messages, and its columns."""


class TableSource:
    """Rows of a file as prompts; the file format is the subclass's."""

    kind = "table"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        path: str | None = None,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        size: int | None = None,
        split: str = "train",
        held_out_path: str | None = None,
        metadata_columns: Sequence[str] = (),
    ) -> None:
        """`size`: at most so many rows are taken, from the first on; None: all.

        Raises ConfigError when a path is missing, DataError naming file and row when one cannot be used.
        """
        self._tokenizer = tokenizer
        self._prompt_column = prompt_column
        self._answer_column = answer_column
        self._metadata_columns = tuple(metadata_columns)
        self._prompts: list[Prompt] = []
        for where, row in self.rows(self._file(path, split, held_out_path)):
            if size is not None and len(self._prompts) == size:
                break
            self._prompts.append(self._made(len(self._prompts), where, row))

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, index: int) -> Prompt:
        """The prompt of the row at `index`, empty lines not counted."""
        return self._prompts[index]

    def rows(self, path: Path) -> Iterator[Row]:
        """Every row of the file. Raises DataError."""
        raise NotImplementedError

    def _file(self, path: str | None, split: str, held_out_path: str | None) -> Path:
        key = "data.options.held_out_path" if split == "held_out" else "data.path"
        chosen = held_out_path if split == "held_out" else path
        if chosen is None:
            also = ", or set evaluation.every to 0" if split == "held_out" else ""
            raise ConfigError(f"{key} is not set; a {self.kind} source needs the path of a file{also}.")
        file = Path(chosen).expanduser()
        if not file.is_file():
            raise DataError(f"The data file {chosen!r} does not exist or is no file; check {key}.")
        return file

    def _made(self, index: int, where: str, row: Mapping[str, Any]) -> Prompt:
        text = self._text(where, _column(where, row, self._prompt_column))
        try:
            tokens = tuple(self._tokenizer.encode(text))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        metadata = {name: _column(where, row, name) for name in self._metadata_columns}
        return Prompt(
            prompt_id=str(index),
            tokens=tokens,
            text=text,
            answer=_column(where, row, self._answer_column),
            metadata={**metadata, "where": where},
        )

    def _text(self, where: str, value: Any) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(_is_message(message) for message in value) or not value:
            raise DataError(
                f"{where}: the prompt in column {self._prompt_column!r} is {_shown(value)}; it must be a text"
                ' or a list of messages {"role": ..., "content": ...}.'
            )
        if isinstance(self._tokenizer, ChatTokenizer) and self._tokenizer.has_chat_template:
            return self._tokenizer.apply_chat(value)
        return "\n\n".join(message["content"] for message in value)


class JsonlSource(TableSource):
    """One JSON object per line; empty lines are skipped."""

    kind = "jsonl"

    def rows(self, path: Path) -> Iterator[Row]:
        """Every line with something on it; numbers in messages count all lines, from 1."""
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: the line is not UTF-8 text ({error.reason}); fix it.") from error
            except json.JSONDecodeError as error:
                reason = error.msg.removesuffix(" at").removesuffix(" starting")
                raise DataError(
                    f"{where}: the line is not valid JSON ({reason} at character {error.pos + 1}); fix it."
                ) from error
            except RecursionError as error:
                raise DataError(f"{where}: the line is JSON nested too deep to read; fix it.") from error
            if not isinstance(row, dict):
                raise DataError(f"{where}: the line is {_shown(row)}; it must be a JSON object {{...}}.")
            yield where, row


class ParquetSource(TableSource):
    """One prompt per row."""

    kind = "parquet"

    def rows(self, path: Path) -> Iterator[Row]:
        """Every row, read batch by batch; numbers in messages count from 1."""
        import pyarrow
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path) as file:
                number = 0
                for batch in file.iter_batches():
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{path}, row {number}", row
        except (pyarrow.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{path}: not a readable parquet file ({reason}).") from error


def _column(where: str, row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, `a.b` being column b inside column a unless there is one called so."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            found = ", ".join(map(str, value)) if isinstance(value, Mapping) else "none"
            meant = nearest(part, list(map(str, value))) if isinstance(value, Mapping) else ""
            raise DataError(f"{where}: there is no column {name!r} (columns: {found}){meant}.")
        value = value[part]
    return value


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
