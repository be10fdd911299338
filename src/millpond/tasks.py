"""The pooling tasks, and the values that their options may have."""

from typing import Literal, get_args

Task = Literal["embed", "token_embed", "sparse_embed", "classify", "token_classify", "score", "reward"]
Role = Literal["query", "document"]
Truncate = Literal["auto", "end", "start", "error"]
OutputDtype = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
Activation = Literal["identity", "sigmoid", "softmax"]
Quantization = Literal["int8", "int8-all", "fp8", "auto"]
ScoreType = Literal["cross-encoder", "listwise", "late-interaction", "bi-encoder"]
ScoreMethod = Literal["auto", "cosine", "maxsim"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
ScoreMeasure = Literal["cross-encoder", "listwise", "maxsim", Similarity]
Stop = Literal["all", "certain", "time"]

TASKS: tuple[Task, ...] = get_args(Task)
ROLES: tuple[Role, ...] = get_args(Role)
TRUNCATIONS: tuple[Truncate, ...] = get_args(Truncate)
OUTPUT_DTYPES: tuple[OutputDtype, ...] = get_args(OutputDtype)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)
SCORE_METHODS: tuple[ScoreMethod, ...] = get_args(ScoreMethod)
