"""What random programs are made of: lines of Python with holes, as data.

Holes: `{f}` a tensor that may be differentiated, `{w}` one whose last dimension is WIDTH, `{s}` one of the shape of the
first hole, `{m}` a matrix of BATCH rows, `{c}` one of three dimensions, `{i}` row numbers, `{b}` booleans, `{k}` a
number, `{t}` a dtype, `{d}` a dimension. What does not fit is found out by running it, and left out.
"""

from __future__ import annotations

BATCH, WIDTH, LENGTH, ROWS = 4, 6, 3, 10

# Inputs, by name: how they are made.
INPUTS = {
    "x": f"torch.randn({BATCH}, {WIDTH})",
    "y": f"torch.randn({BATCH}, {WIDTH})",
    "z": f"torch.randn({BATCH}, {LENGTH}, {WIDTH})",
    "p": f"torch.rand({BATCH}, {WIDTH})",
    "low": f"torch.randn({BATCH}, {WIDTH}).bfloat16()",
    "half": f"torch.randn({BATCH}, {WIDTH}).half()",
    "wide": f"torch.randn({BATCH}, {WIDTH}).double()",
    "ids": f"torch.randint({ROWS}, ({BATCH},))",
    "at": f"torch.randint({BATCH}, ({BATCH},))",
    "mask": f"torch.rand({BATCH}, {WIDTH}) > 0.5",
}

# What `self` has, by name: lines of `__init__`. A line may need others, which it names by `self.`.
PARTS = {
    "l": f"self.l = nn.Linear({WIDTH}, {WIDTH})",
    "m": f"self.m = nn.Linear({WIDTH}, {WIDTH}, bias=False)",
    "tied": f"self.tied = nn.Linear({WIDTH}, {WIDTH}); self.tied.weight = self.l.weight",
    "wide": f"self.wide = nn.Linear({WIDTH}, 2 * {WIDTH})",
    "norm": f"self.norm = nn.LayerNorm({WIDTH})",
    "rms": f"self.rms = nn.RMSNorm({WIDTH})",
    "bn": f"self.bn = nn.BatchNorm1d({WIDTH})",
    "drop": "self.drop = nn.Dropout(0.3)",
    "conv": f"self.conv = nn.Conv1d({LENGTH}, {LENGTH}, 3, padding=1)",
    "emb": f"self.emb = nn.Embedding({ROWS}, {WIDTH})",
    "attn": f"self.attn = nn.MultiheadAttention({WIDTH}, 2, batch_first=True)",
    "block": f"self.block = nn.Sequential(nn.Linear({WIDTH}, 8), nn.GELU(), nn.Linear(8, {WIDTH}))",
    "twice": f"self.twice = nn.ModuleList([nn.Linear({WIDTH}, {WIDTH})] * 2)",
    "frozen": f"self.frozen = nn.Linear({WIDTH}, {WIDTH}).to(torch.bfloat16).requires_grad_(False)",
    "weight": f"self.weight = nn.Parameter(torch.randn({WIDTH}, {WIDTH}) / 3)",
    "gain": f"self.gain = nn.Parameter(torch.ones({WIDTH}))",
    "temperature": "self.temperature = nn.Parameter(torch.tensor(0.7))",
    "mean": f"self.register_buffer('mean', torch.zeros({WIDTH}))",
    "table": f"self.register_buffer('table', torch.linspace(-1, 1, {WIDTH}), persistent=False)",
    "steps": "self.register_buffer('steps', torch.zeros((), dtype=torch.long))",
    "factor": "self.factor = 0.5",
}

DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16", "torch.float64", "torch.float")

# Right sides, by what they try. Each is given a name of its own.
EXPRESSIONS: dict[str, tuple[str, ...]] = {
    "product": (
        "self.l({w})", "self.l({w})", "self.m({w})", "self.tied({w})", "self.block({w})", "{w} @ self.weight",
        "F.linear({w}, self.weight, self.gain)", "self.l({w}) + self.tied({w})", "F.linear({w}, self.l.weight.t())",
        "torch.matmul({w}, {s}.mT)", "{m} @ {m}.t()", "torch.einsum('...i,ij->...j', {w}, self.weight)",
        "torch.addmm(self.gain, {m}, self.weight)", "self.conv({c})", "self.attn({c}, {c}, {c})[0]",
        "self.attn({c}, {c}, {c}, need_weights=False)[0]", "F.scaled_dot_product_attention({c}, {c}, {c})",
        "torch.bmm({c}, {c}.transpose(1, 2))", "self.wide({w}).chunk(2, -1)[0]", "F.glu(self.wide({w}), -1)",
        "self.frozen({w}.to(self.frozen.weight.dtype)).to({w}.dtype)", "self.twice[1](self.twice[0]({w}))",
        "self.emb({i})", "torch.outer(self.gain, self.table)", "torch.mv(self.weight, self.gain)",
        "F.bilinear({m}, {m}, self.weight.expand(2, -1, -1))",
        "torch.linalg.multi_dot([{m}, self.weight, self.weight])",
        "torch.cdist({m}, {m})", "F.conv1d({c}, self.conv.weight)",
        "torch.baddbmm({c}, {c}, self.weight.expand(4, -1, -1))",
        "torch.tensordot({w}, self.weight, 1)", "torch.kron(self.gain, self.table)",
    ),
    "cast": (
        "{f}.float()", "{f}.to(torch.float32)", "{f}.to({t})", "{f}.to(dtype={t})", "{f}.half()", "{f}.bfloat16()",
        "{f}.double()", "{f}.type({t})", "{f}.type(torch.FloatTensor)", "{f}.type('torch.BFloat16Tensor')",
        "{f}.type_as({f})", "{f}.to({f}.dtype)", "{f}.to({f})", "{f}.to({f}.device, {f}.dtype)",
        "{f}.to(device={f}.device, dtype={f}.dtype)", "{f}.type({f}.dtype)", "torch.Tensor.float({f})",
        "{f}.to(torch.float32, copy=True)", "{f}.to({t}, non_blocking=True)", "{f}.to(torch.get_default_dtype())",
        "{f}.float(memory_format=torch.contiguous_format)", "{f}.to({t}, memory_format=torch.contiguous_format)",
        "{f}.to('cpu', {t})", "{f}.to(torch.promote_types({f}.dtype, {f}.dtype))",
        "{f}.to(torch.result_type({f}, {f}))",
        "{f}.to(self.l.weight.dtype)", "{f}.float().to({f}.dtype)", "(lambda t: (t.float() * 2).to(t.dtype))({f})",
        "torch.as_tensor({f}, dtype={t})", "{f}.float().softmax(-1).type_as({f})", "{f}.to(torch.zeros(1, dtype={t}))",
        "{f}.long()", "({f} * 3).to(torch.int32)", "{f}.bool()", "{b}.float()", "{b}.to({f}.dtype)",
        "{i}.to({f}.dtype)",
        "self.norm({w}.float()).type_as({w})", "self.l({w}.float())", "{f}.half().float()",
        "{f}.bfloat16().to({f}.dtype)",
    ),
    "read": (
        "torch.finfo({f}.dtype).eps * {f}", "{f}.clamp(min=torch.finfo({f}.dtype).tiny)",
        "{f}.masked_fill({b}, torch.finfo({f}.dtype).min).softmax(-1)",
        "{f} + torch.ones({f}.shape[-1:], dtype={f}.dtype)",
        "{f} * torch.arange({f}.shape[-1], dtype={f}.dtype)", "{f} + {f}.new_ones({f}.shape[-1:])",
        "{f} - torch.full_like({f}, 0.1)", "{f} * torch.full({f}.shape[-1:], 0.3, dtype={f}.dtype)",
        "{f} * 2 if {f}.dtype == torch.float32 else {f} + 1", "{f} / {f}.element_size()",
        "{f} + torch.tensor(0.3, dtype={f}.dtype)", "{f} * {f}.new_tensor([0.3])", "F.softmax({f}, -1, dtype={t})",
        "F.log_softmax({f}, -1, dtype={f}.dtype)", "{f}.sum(-1, dtype={t})", "{f}.mean(0, dtype=torch.float32)",
        "{f}.cumsum(-1, dtype={f}.dtype)", "torch.zeros_like({f}, dtype={t}) + {s}", "{f} * {f}.dtype.itemsize",
        "torch.linalg.vector_norm({f}, dim=-1, dtype={f}.dtype)", "torch.rand_like({f}) * 0.1 + {s}",
        "torch.empty_like({f}).fill_(0.5) * {s}", "{f}.new_zeros({f}.shape) + {s}",
        "{f} if {f}.is_floating_point() else {f} + 1",
        "torch.full((), {k}, dtype={f}.dtype) * {f}", "torch.eye({w}.shape[-1], dtype={w}.dtype) @ self.weight",
        "torch.where({b}, {f}, torch.tensor(torch.finfo({f}.dtype).min, dtype={f}.dtype)).softmax(-1)",
    ),
    "view": (
        "{f}.transpose(-1, -2)", "{f}.mT", "{f}[..., :3]", "{f}[:2]", "{f}.unsqueeze({d})", "{f}.flatten()",
        "{f}.reshape(-1)", "{f}.view(-1, 2)", "{f}.narrow(-1, 0, 2)", "{f}.unbind(0)[1]", "{f}.chunk(2, -1)[1]",
        "{f}.split(2, -1)[0]", "{f}.expand(2, *{f}.shape)", "{f}.permute(*range({f}.dim())[::-1])", "{f}.detach()",
        "{f}.diagonal()", "{f}.contiguous()", "{f}.squeeze()", "{f}.flip(0)", "{f}.select(0, 1)", "{f}[{i}]",
        "{f}.repeat(2, 1)", "{f}.clone()", "{f}.movedim(0, -1)", "{f}.unfold(-1, 2, 1)", "{f}[..., None]", "{f}.data",
        "{f}.t()", "{f}.swapaxes(0, -1)", "{f}.view({f}.shape)", "{f}.tril()", "{f}.roll(1, -1)", "{f}.view_as({s})",
        "{f}[{b}]", "torch.as_strided({m}, (2, 2), (1, 1))", "{f}.take_along_dim({i}[:, None], 0)",
    ),
    "arithmetic": (
        "{f} + {s}", "{f} * {s}", "{f} - {f}", "{f} * {k}", "{k} - {f}", "{f} / ({s}.abs() + 1)", "{f} + self.gain",
        "{f} * self.temperature", "{f} - self.table", "{f} + {k}", "-{f}", "{f} ** 2", "{f}.abs().sqrt()",
        "({f}.abs() + 1e-6).rsqrt()", "{f}.clamp(-1, 1)", "{f}.clamp(1e-7, 1 - 1e-7)", "torch.where({b}, {f}, {s})",
        "torch.maximum({f}, {s})", "torch.lerp({f}, {s}, 0.3)", "torch.addcmul({f}, {s}, {s})",
        "{f}.exp().clamp(max=9)",
        "({f}.abs() + 1).log()", "torch.log1p({f}.abs())", "{f}.sigmoid()", "{f}.tanh()", "{f}.sin()", "{f}.erf()",
        "F.relu({f})", "F.gelu({f})", "F.silu({f})", "F.softplus({f})", "{f}.relu()", "F.leaky_relu({f})",
        "{f}.round()",
        "{f} * self.factor", "{f}.remainder(1.5)", "torch.atan2({f}, {s})", "{f} @ {f}.mT * 0.1",
        "{f}.masked_fill({b}, 0.0)",
        "{f} * {b}", "torch.hypot({f}, {s})", "{f}.pow(3) * 0.1", "torch.add({f}, {s}, alpha=0.5)", "{f}.sub({k})",
        "torch.complex({f}, {s}).abs()", "torch.polar({f}.abs(), {s}).real", "torch.nan_to_num({f})", "{f} + {i}.sum()",
    ),
    "reduce": (
        "{f}.sum()", "{f}.mean(-1)", "{f}.mean(-1, keepdim=True)", "{f}.var(-1)", "{f}.std(0)", "{f}.softmax(-1)",
        "F.log_softmax({f}, -1)", "{f}.logsumexp(-1)", "{f}.amax(-1)", "{f}.max(-1)[0]", "{f}.norm(dim=-1)",
        "{f}.prod(-1)",
        "{f}.cumsum(0)", "self.norm({w})", "self.rms({w})", "F.layer_norm({w}, ({w}.shape[-1],))", "self.bn({m})",
        "self.drop({f})", "F.dropout({f}, 0.3, self.training)", "F.normalize({f}, dim=-1)", "{f}.topk(2)[0]",
        "{f}.sort(-1)[0]", "{f} * ({f}.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()", "F.mse_loss({f}, {s})",
        "F.cross_entropy({m}, {i})", "F.cosine_similarity({f}, {s}, dim=-1)", "F.smooth_l1_loss({f}, {s})",
        "F.binary_cross_entropy_with_logits({f}, {s}.sigmoid())", "F.kl_div(F.log_softmax({f}, -1), {s}.softmax(-1))",
        "F.nll_loss(F.log_softmax({m}, -1), {i})", "({f} - {f}.mean()) / ({f}.std() + 1e-5)", "F.group_norm({c}, 3)",
        "torch.cat([{f}, {s}], 0)", "torch.stack([{f}, {s}])", "F.avg_pool1d({c}, 2)", "F.max_pool1d({c}, 2)",
        "F.interpolate({c}, scale_factor=2)", "F.pad({f}, (1, 1))", "torch.cross({c}, {c}, dim=1)", "{f}.argmax(-1)",
        "{f} > {s}", "{f}.median(-1)[0]", "torch.zeros({f}.shape[-1]).index_add(0, {i}, {m}[:, 0])",
        "torch.zeros_like({m}).scatter_add(0, {i}[:, None], {m})", "{m}.gather(1, {i}[:, None])", "{f}.any(-1)",
        "{m}.index_select(0, {i})", "torch.histc({f}.detach().float(), 4)", "{f}.quantile(0.5)", "torch.trapz({f})",
    ),
    "checkpoint": (
        "checkpoint(self.block, {w}, use_reentrant=False)",
        "checkpoint(lambda a, b: self.l(a).tanh() * b, {w}, {s}, use_reentrant=False)",
        "checkpoint(lambda a: self.drop(self.block(a.float())).to(a.dtype), {w}, use_reentrant=False)",
    ),
    "shape": (
        "self.l({w}) if {f}.shape[0] > 2 else {w}", "{f}.sum(0) / {f}.shape[0]", "{f} if {f}.dim() == 2 else {f} * 2",
        "sum(({f}[i] for i in range({f}.shape[0])), 0.0)", "torch.stack([self.l(t) for t in {c}])",
        "[self.l, self.m][{f}.dim() % 2]({w})", "{f} * (0.5 if self.training else 2.0)",
        "{f}.reshape({f}.shape[0], -1)",
        "{f} * {f}.size(-1) ** -0.5", "{f} if torch.is_grad_enabled() else {f} * 1.5", "{f} * len({f})",
    ),
}  # fmt: skip

# Lines that write: in place, into buffers, through views.
STATEMENTS: tuple[str, ...] = (
    "{f}.add_({s})", "{f}.mul_({k})", "{f}[..., 0] = {k}", "{f}[0] = {f}[0]", "{f} += {s}", "{f} *= {k}", "{f} -= {s}",
    "{f}.copy_({s})", "{f}.masked_fill_({b}, 0.0)", "{f}.clamp_(-1, 1)", "F.relu({f}, inplace=True)", "{f}.zero_()",
    "{f}[{b}] = 0.0", "{f}.unsqueeze(0).mul_(0.5)", "{f}.view(-1)[0] = 1.0", "{f}.t().add_(1.0)", "{f}.fill_({k})",
    "{f}.index_add_(0, {i}, {s})", "{f}.scatter_(1, {i}[:, None], 0.5)", "{f}.index_put_(({i},), {s}, accumulate=True)",
    "{f}.transpose(0, 1)[0] *= 2", "{f}.addcmul_({s}, {s})", "{f}.lerp_({s}, 0.3)", "{f}.detach().mul_(0.5)",
    "{f}.sigmoid_()",
    "{f}[:2].add_({f}[:2])", "{f} /= 2", "{f}[..., :2] = {f}[..., 2:4]", "{f}.div_({k})", "{f}.pow_(2)",
    "self.mean.mul_(0.9).add_({m}.detach().mean(0), alpha=0.1)", "self.steps += 1", "self.steps.add_(1)",
    "self.mean.copy_({m}.detach()[0])", "self.mean = self.mean * 0.9 + {m}.detach().mean(0) * 0.1",
    "self.mean.lerp_({m}.detach().mean(0), 0.1)", "self.mean += {m}.detach().sum(0)", "self.table = {m}.detach()[0]",
)  # fmt: skip

# Lines that hold others.
BLOCKS: tuple[str, ...] = (
    'with torch.autocast("cpu", enabled=False):', 'with torch.autocast("cpu", enabled=False):',
    'with torch.autocast("cpu", dtype=torch.bfloat16):', 'with torch.autocast("cpu", dtype=torch.float16):',
    'with torch.amp.autocast("cpu"):', "with torch.no_grad():", "with torch.enable_grad():", "if {f}.shape[0] > 3:",
    "if {f}.dim() > 1:", "for _ in range(2):", "if self.training:", "for _ in range({f}.shape[0] // 2):",
    "with torch.set_grad_enabled(self.training):", "if {f}.dtype == torch.float32:",
)  # fmt: skip

OUTPUTS: tuple[str, ...] = (
    "{f}", "{f}", "({f}, {f})", "{{'a': {f}, 'b': ({f}, [{f}])}}", "[{f}, {{'c': {f}}}, None]",
    "({f}, {f}.shape[0], {f})",
    "({f}, {f}.detach(), {f})", "Pair({f}, {f})", "{f}.sum(), {f}", "({f}, ({f},), 3.0)", "({f}, {f}.float())",
    "{f}.to({f}.dtype)",
)  # fmt: skip

WEIGHTS = {"product": 6, "cast": 5, "read": 3, "view": 3, "arithmetic": 4, "reduce": 4, "checkpoint": 0.3, "shape": 1}
