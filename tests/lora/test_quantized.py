"""Adapters over layers of bitsandbytes: gradients, the fusion, roles, and exports on either base."""

import pytest
import torch
import transformers
from lora_toys import batch, held_factors, random_adapters, random_stack, tiny_t5
from peft import PeftModel
from peft.utils.integrations import dequantize_bnb_weight
from test_export import ALPHA, CARD, ITEMS
from tiny_causal import tiny_causal

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes (the extra gpu) is not installed")


from fedecider.models.adapters import (  # noqa: E402
    Adapters,
    LoraSettings,
    adapter_shapes,
    attach_lora,
    base_hash,
    fusion,
    named_factors,
    put,
)
from fedecider.models.export import SavedBase, export_adapter  # noqa: E402
from fedecider.models.fused_linear import fused_layers  # noqa: E402
from idgen.backbone import load_backbone  # noqa: E402
from idgen.backbones.families import family_of  # noqa: E402
from idgen.losses import sequence_loss  # noqa: E402
from idgen.quantize import quantize_of  # noqa: E402

TARGETS = ("attention", "feed_forward", "output")
MODELS = {"llama": lambda: tiny_causal(attention_bias=True), "t5": tiny_t5}
LAYERS = {"nf4": "Linear4bit", "int8": "Linear8bitLt"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("backbones")
    for name, make in MODELS.items():
        make().save_pretrained(root / name)
    return root


def adapted(folder, quantize, targets=TARGETS):
    tokenizer = type("Tokenizer", (), {"__len__": lambda self: 40})()
    return attach_lora(load_backbone(folder, tokenizer, quantize), LoraSettings(3, targets))


@pytest.mark.parametrize("quantize", LAYERS)
@pytest.mark.parametrize("name", MODELS)
def test_roles_mean_the_same_and_the_output_keeps_its_precision(folders, name, quantize):
    plain, model = (adapted(folders / name, format) for format in ("none", quantize))
    assert adapter_shapes(model) == adapter_shapes(plain)
    kinds = {path: type(layer.get_base_layer()).__name__ for path, layer in fused_layers(model).items()}
    whole = {path for path in kinds if path.endswith(("lm_head", ".wo"))}  # transformers keeps wo of a T5 in fp32
    assert {path for path, kind in kinds.items() if kind == "Linear"} == whole
    assert {kind for path, kind in kinds.items() if path not in whole} == {LAYERS[quantize]}
    assert not isinstance(model.get_input_embeddings(), bitsandbytes.nn.Embedding4bit)
    assert {parameter.dtype for parameter in named_factors(model).values()} == {torch.float32}
    assert (quantize_of(plain), quantize_of(model)) == ("none", quantize)


@pytest.mark.parametrize("quantize", LAYERS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_arrive_after_an_evaluation_and_the_loss_falls(folders, name, quantize):
    model = adapted(folders / name, quantize)
    put(model, Adapters(random_adapters(model, 3, 0.1)))
    before = base_hash(model)
    with torch.no_grad():
        start = sequence_loss(model.eval(), batch())
    named = named_factors(model.train())
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2)
    for _ in range(8):
        loss = sequence_loss(model, batch())
        optimizer.zero_grad()
        loss.backward()
        assert [path for path, parameter in named.items() if not bool(parameter.grad.any())] == []
        optimizer.step()
    with torch.no_grad():
        assert sequence_loss(model.eval(), batch()) < start - 0.1
    assert base_hash(model) == before


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("quantize", LAYERS)
def test_own_pair_and_peers_add_the_dense_sum(folders, quantize, training):
    model = adapted(folders / "llama", quantize, ("attention", "feed_forward")).train(training)
    stack, own = random_stack(model, 3), 1
    alpha = put(model, fusion(stack, own, ALPHA))
    for path, layer in fused_layers(model).items():
        update = sum(
            weight * b @ a for weight, a, b in zip(ALPHA, stack[f"{path}.lora_a"], stack[f"{path}.lora_b"], strict=True)
        )
        x = torch.randn(5, 2, update.shape[1], generator=torch.Generator().manual_seed(1)).requires_grad_()
        found, base = layer(x), layer.base_layer(x)
        torch.testing.assert_close(found - base, x @ update.t(), rtol=1e-4, atol=1e-4)
        (grad,) = torch.autograd.grad(found.sum(), x)
        weight = dequantize_bnb_weight(layer.base_layer.weight, state=getattr(layer.base_layer, "state", None))
        wanted = (weight.float() + update).sum(0).expand_as(x)
        torch.testing.assert_close(grad, wanted, rtol=1e-2, atol=1e-2)
        layer(x).square().sum().backward()
    assert bool((alpha.grad != 0).all())


@pytest.mark.parametrize("quantize", LAYERS)
@pytest.mark.parametrize("name", MODELS)
def test_an_export_loads_with_plain_peft_on_either_base(folders, tmp_path, name, quantize):
    model = adapted(folders / name, quantize, ("attention",)).eval()
    put(model, fusion(random_stack(model, 3), 0, ALPHA))
    given = (held_factors(model), tmp_path / "crime", SavedBase(folders / name, "x"), ITEMS, CARD, batch())
    assert export_adapter(model, *given) <= 1e-5
    family = family_of(model)
    auto_class = getattr(transformers, family.auto_class)
    plain = PeftModel.from_pretrained(auto_class.from_pretrained(folders / name), tmp_path / "crime").eval()
    wanted = adapted(folders / name, "none", ("attention",)).eval()
    put(wanted, fusion(random_stack(wanted, 3), 0, ALPHA))
    inputs = family.plain_inputs(batch())
    with torch.no_grad():
        found, exact, quantized = (one(**inputs).logits for one in (plain, wanted, model))
        bare = adapted(folders / name, "none", ("attention",)).eval()(**inputs).logits
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    assert 0 < (quantized - found).norm() < (bare - found).norm()  # the adapters move more than the rounding
