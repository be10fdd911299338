"""The names of the pooling tasks: what a caller may ask of a checkpoint."""

from typing import Literal, get_args

Task = Literal["embed", "token_embed", "classify", "token_classify", "score", "reward"]
Role = Literal["query", "document"]
Truncate = Literal["end", "start", "error"]
OutputDtype = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]

TASKS: tuple[Task, ...] = get_args(Task)
ROLES: tuple[Role, ...] = get_args(Role)
TRUNCATIONS: tuple[Truncate, ...] = get_args(Truncate)
OUTPUT_DTYPES: tuple[OutputDtype, ...] = get_args(OutputDtype)
