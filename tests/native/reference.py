"""The steps of a plan in float64, one text at a time: what the native encoder has to compute."""

import torch
from tests.native.steps import activated, attended, linear, normalized, numbers, rotated

from millpond.models.native import structs


class Reference:
    """Takes the calls of a `PlanBuilder`, and runs them."""

    def __init__(self):
        self.steps = []

    def __getattr__(self, name):
        if name not in {"embed", "norm", "heads", "up_proj", "rotary", "attention", "o_proj", "mlp"}:
            raise AttributeError(name)
        return lambda *parts, **options: self.steps.append((name, parts, options))

    def norm_weights(self, kind, weight, bias, epsilon, offset=0.0):
        return (kind, None if weight is None else weight.double() + offset, bias, epsilon)

    def encode(self, ids, lengths, *, offset=0, types=None, keys=None, skip=None, rows="all"):
        results = []
        ids = torch.as_tensor(ids).long().split(lengths)
        types = [None] * len(lengths) if types is None else torch.as_tensor(types).long().split(lengths)
        for i, text in enumerate(ids):
            states = self._run(text, offset, types[i], None if keys is None else int(keys[i]))
            first = 0 if skip is None else int(skip[i])
            results.append(
                {"all": states, "first": states[first], "last": states[-1], "mean": states[first:].mean(0)}[rows]
            )
        return torch.cat(results) if rows == "all" else torch.stack(results)

    def _run(self, ids, offset, types, keys):
        self.states = self.sums = self.branch = self.parts = None
        for name, parts, options in self.steps:
            if name == "embed":
                self._embed(ids, offset, types, *parts, **options)
            elif name == "attention":
                options = {key: value for key, value in options.items() if key != "last"}
                self._attention(keys, **options)
            elif name == "rotary":
                self._rotary(len(ids), offset, **options)
            else:
                getattr(self, f"_{name}")(*parts, **options)
        return self.states

    def _embed(self, ids, offset, types, words, positions=None, kinds=None, scale=1.0):
        self.sums = words[ids].double() * scale
        if positions is not None:
            self.sums = self.sums + positions[offset : offset + len(ids)].double()
        if kinds is not None:
            self.sums = self.sums + kinds[torch.zeros_like(ids) if types is None else types].double()

    def _norm(self, norm, columns, *, residual=False, keep=False, branch=False):
        if isinstance(norm, structs.NormWeights):
            norm = (norm.kind, None, None, norm.epsilon)
        if branch:
            self.sums = self.sums + normalized(self.branch, *norm)
            return
        self.states = normalized(self.sums + self.states if residual else self.sums, *norm)
        self.sums = self.states if keep else self.sums

    def _heads(self, *layers):
        self.parts = torch.cat([product(self.states, layer) for layer in layers], dim=1)

    def _up_proj(self, layer):
        self.sums = product(self.states, layer)

    def _rotary(self, length, offset, *, heads, kv_heads, dim, norm=None, key_norm=None, cosines=None, sines=None):
        parts = list(self.parts.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1))
        for i, weights in enumerate((norm, key_norm)):
            if weights is not None:
                parts[i] = normalized(parts[i], *weights)
            if cosines is not None:
                parts[i] = rotated(parts[i], cosines[offset : offset + length], sines[offset : offset + length])
        self.parts = torch.cat(parts, dim=1).flatten(1)

    def _attention(self, keys, *, heads, kv_heads, dim, **masks):
        parts = self.parts.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
        self.parts = attended(*parts, count=keys, **masks)[0].flatten(1)

    def _put(self, result, add, branch):
        if branch:
            self.branch = result
        else:
            self.sums = self.sums + result if add else result

    def _o_proj(self, layer, *, add=False, branch=False):
        self._put(product(self.parts, layer), add, branch)

    def _mlp(self, up, down, activation, *, gate=None, add=False, branch=False):
        inner = product(self.states, up)
        inner = (
            activated(inner, activation) if gate is None else activated(product(self.states, gate), activation) * inner
        )
        self._put(product(inner, down), add, branch)


def product(rows, layer):
    result = rows @ layer.weight.double().T
    return result if layer.bias is None else result + layer.bias.double()


VOCABULARY, POSITIONS = 211, 1300


def post_norm(dtype, *, layers=2, activation="gelu"):
    """A BERT of 96 columns: positions, types, layer norms after residuals."""
    hidden, heads, dim, inner = 96, 3, 32, 416
    draw = drawing(dtype)

    def add(builder):
        seed = iter(range(1000))
        tables = [draw((rows, hidden), next(seed)) for rows in (VOCABULARY, POSITIONS, 2)]
        builder.embed(*tables)
        norm = builder.norm_weights(
            structs.LAYER_NORM, 1 + draw(hidden, next(seed), 0.1), draw(hidden, next(seed)), 1e-5
        )
        builder.norm(norm, hidden)
        for i in range(layers):
            builder.heads(*(draw.linear(heads * dim, hidden, next(seed)) for _ in range(3)))
            builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=dim**-0.5, last=i == layers - 1)
            builder.o_proj(draw.linear(hidden, heads * dim, next(seed)))
            builder.norm(norm, hidden, residual=True)
            builder.mlp(draw.linear(inner, hidden, next(seed)), draw.linear(hidden, inner, next(seed)), activation)
            builder.norm(norm, hidden, residual=True)

    return add


def pre_norm(dtype, *, layers=2):
    """A decoder: scaled words, RMS norms before the parts and after them, rotary heads in groups, gates, a window."""
    hidden, heads, kv_heads, dim, inner = 64, 4, 2, 32, 448
    draw = drawing(dtype)

    def add(builder):
        seed = iter(range(1000))
        builder.embed(draw((VOCABULARY, hidden), next(seed)), scale=hidden**0.5)
        angles = torch.arange(POSITIONS)[:, None] / 100.0 ** (torch.arange(dim // 2) * 2 / dim)
        for i in range(layers):
            rms = [
                builder.norm_weights(structs.RMS_NORM, draw(columns, next(seed), 0.1), None, 1e-6, offset=1.0)
                for columns in (hidden, dim, dim, hidden, hidden, hidden)
            ]
            builder.norm(rms[0], hidden)
            shapes = [heads * dim, kv_heads * dim, kv_heads * dim]
            builder.heads(*(draw.linear(rows, hidden, next(seed), bias=False) for rows in shapes))
            builder.rotary(
                heads=heads,
                kv_heads=kv_heads,
                dim=dim,
                norm=rms[1],
                key_norm=rms[2],
                cosines=angles.cos(),
                sines=angles.sin(),
            )
            builder.attention(
                heads=heads,
                kv_heads=kv_heads,
                dim=dim,
                scale=dim**-0.5,
                causal=True,
                window=None if i % 2 else 7,
                last=i == layers - 1,
            )
            builder.o_proj(draw.linear(hidden, heads * dim, next(seed), bias=False), branch=True)
            builder.norm(rms[3], hidden, branch=True)
            builder.norm(rms[4], hidden)
            up, gate = (draw.linear(inner, hidden, next(seed), bias=False) for _ in range(2))
            down = draw.linear(hidden, inner, next(seed), bias=False)
            if i == 0:
                builder.mlp(up, down, "silu", gate=gate, branch=True)
                builder.norm(rms[5], hidden, branch=True)
            else:
                builder.mlp(up, down, "gelu_new", gate=gate, add=True)
        builder.norm(builder.norm_weights(structs.RMS_NORM, None, None, 1e-6), hidden)

    return add


MODELS = {"post-norm": post_norm, "pre-norm": pre_norm}


def drawing(dtype):
    """Draws numbers that a precision has."""

    def draw(shape, seed, scale=1.0):
        return numbers(shape, dtype, seed, scale)

    def layer(out, into, seed, bias=True):
        return linear(draw((out, into), seed, 1.5 * into**-0.5), draw(out, seed + 500, 0.1) if bias else None)

    draw.linear = layer
    return draw
