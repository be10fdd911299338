"""Names of the codecs, for options and annotations: this module imports no torch. Their table is in ``rows``."""

from typing import Literal

MemoryCodec = Literal["int8", "bfloat16", "float32"]
PlaidCodec = Literal["int8", "4", "2"]
