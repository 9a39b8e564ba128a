"""Prompts from the user's own jsonl or parquet file.

Invariants: the whole file is read and checked before anything starts, so that an error names the bad line at
once; `prompt_id` is the index of the prompt among the selected rows.

Options (`data.options`): `held_out_path`, the file for evaluation; `metadata_columns`, columns passed to the
verifier under their own names; `unique`, leave out rows that repeat an earlier prompt and answer
(DAPO-Math-17k has each a hundred times); `max_prompt_tokens`, leave out longer prompts instead of refusing
the file.

Columns may be nested and are then written with dots, such as `reward_model.ground_truth`. Without a setting,
the first row decides among the names in common data sets, so that files like DAPO-Math-17k, GSM8K and MATH
need no settings. If an answer contains `answer_marker`, as in GSM8K's working followed by `#### 42`, only the
text after the last marker counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from staleflow.data.chat import PLAIN, ChatFormat, PromptWriter, Written
from staleflow.data.tokenizers import Tokenizer
from staleflow.data.trajectory import Prompt
from staleflow.errors import ConfigError, DataError
from staleflow.suggestions import did_you_mean

Row = tuple[str, Mapping[str, Any]]
"""Its place, for messages, and its columns."""

PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
"""Tried in this order if the config names no column."""
ANSWER_MARKER = "####"


class TableSource:
    """Rows of a file as prompts; subclasses read the file format."""

    kind = "table"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        path: str | None = None,
        prompt_column: str | None = None,
        answer_column: str | None = None,
        answer_marker: str | None = ANSWER_MARKER,
        chat: ChatFormat = PLAIN,
        size: int | None = None,
        split: str = "train",
        held_out_path: str | None = None,
        metadata_columns: Sequence[str] = (),
        unique: bool = False,
        max_prompt_tokens: int | None = None,
    ) -> None:
        """`size`: use at most this many prompts, from the first on; None: all.

        Raises ConfigError if a path is not set, DataError with file and row if a row is unusable.
        """
        self._writer = PromptWriter(tokenizer, chat)
        self._columns = (prompt_column, answer_column)
        self._answer_marker = answer_marker
        self._metadata_columns = tuple(metadata_columns)
        self._max_prompt_tokens = max_prompt_tokens
        self._prompts: list[Prompt] = []
        self._repeated = self._too_long = 0
        seen: set[str] = set()
        for where, row in self.rows(self._file(path, split, held_out_path)):
            if size is not None and len(self._prompts) == size:
                break
            if unique and self._is_in(seen, where, row):
                self._repeated += 1
            else:
                self._add(where, row)

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, index: int) -> Prompt:
        """The prompt at `index`, not counting rows that were left out."""
        return self._prompts[index]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user: how many rows were left out, and why."""
        counts = (
            (self._repeated, "repeat earlier ones"),
            (self._too_long, f"exceed {self._max_prompt_tokens} tokens"),
        )
        return tuple(f"{n:,} prompts are left out because they {why}" for n, why in counts if n)

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
            raise DataError(f"The data file {chosen!r} does not exist or is not a file; check {key}.")
        return file

    def _read(self, where: str, row: Mapping[str, Any]) -> tuple[Any, Any]:
        """The row's prompt and answer. The first row decides the columns that the config does not name."""
        prompt, answer = self._columns
        prompt = prompt or _first_of(where, row, PROMPT_COLUMNS, "data.prompt_column")
        answer = answer or _first_of(where, row, ANSWER_COLUMNS, "data.answer_column")
        self._columns = (prompt, answer)
        return _column(where, row, prompt), _column(where, row, answer)

    def _is_in(self, seen: set[str], where: str, row: Mapping[str, Any]) -> bool:
        key = repr(self._read(where, row))
        known = key in seen
        seen.add(key)
        return known

    def _add(self, where: str, row: Mapping[str, Any]) -> None:
        prompt, answer = self._read(where, row)
        written = self._written(where, prompt)
        if self._max_prompt_tokens is not None and len(written.tokens) > self._max_prompt_tokens:
            self._too_long += 1
            return
        if isinstance(answer, str) and self._answer_marker and self._answer_marker in answer:
            answer = answer.rpartition(self._answer_marker)[2].strip()
        metadata = {name: _column(where, row, name) for name in self._metadata_columns}
        self._prompts.append(
            Prompt(
                prompt_id=str(len(self._prompts)),
                tokens=written.tokens,
                text=written.text,
                answer=answer,
                metadata={**metadata, "where": where},
            )
        )

    def _written(self, where: str, value: Any) -> Written:
        is_chat = isinstance(value, list) and value and all(_is_message(message) for message in value)
        if not isinstance(value, str) and not is_chat:
            raise DataError(
                f"{where}: the prompt in column {self._columns[0]!r} is {_shown(value)}; it must be a text"
                ' or a list of messages {"role": ..., "content": ...}.'
            )
        try:
            return self._writer.write(value)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error


class JsonlSource(TableSource):
    """One JSON object per line; empty lines are skipped."""

    kind = "jsonl"

    def rows(self, path: Path) -> Iterator[Row]:
        """Every line that is not blank; numbers in messages count all lines, from 1."""
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
                raise DataError(f"{where}: the line is JSON nested too deeply to read; fix it.") from error
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


def _first_of(where: str, row: Mapping[str, Any], names: Sequence[str], key: str) -> str:
    """The first of `names` that exists in the row."""
    for name in names:
        try:
            _column(where, row, name)
        except DataError:
            continue
        return name
    found = ", ".join(map(str, row)) or "none"
    raise DataError(
        f"{where}: there is no column {' or '.join(map(repr, names))} (columns: {found}); set {key}."
    )


def _column(where: str, row: Mapping[str, Any], name: str) -> Any:
    """The value of a column. `a.b` is column b inside column a, unless a column has this name."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            found = ", ".join(map(str, value)) if isinstance(value, Mapping) else "none"
            meant = did_you_mean(part, map(str, value)) if isinstance(value, Mapping) else ""
            raise DataError(
                f"{where}: there is no column {name!r} (columns: {found}){f'; {meant}' if meant else '.'}"
            )
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
