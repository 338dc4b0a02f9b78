"""What every family of backbones owes to all that stands above it."""

from functools import partial

import pytest
import torch
import transformers
from exact_scores import allowed_tokens, score_catalogue, teacher_forced
from peft import LoraConfig, get_peft_model
from tiny_causal import tiny_causal
from tiny_t5 import tiny_t5
from tokenizers import Tokenizer, models
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from distill.losses import finetune_loss, pair_losses
from distill.pairing import build_student, pair_parameters, pairs_of
from fedecider.models.adapters import LoraSettings, adapter_parameters, attach_lora, read_pair
from fedecider.models.export import load_adapter, save_peft_folder
from idgen.backbone import load_backbone
from idgen.backbones.causal import rows
from idgen.backbones.families import family_of, family_of_config
from idgen.backbones.family import evaluating, labels_of, num_targets
from idgen.decode import constrained_beam_search
from idgen.item_scores import trie_log_probs
from idgen.losses import sequence_loss
from idgen.trie import Trie

MODELS = {"t5": tiny_t5, "llama": partial(tiny_causal, "llama"), "qwen2": partial(tiny_causal, "qwen2")}
SIZES = {"t5": "num_layers", "llama": "num_hidden_layers", "qwen2": "num_hidden_layers"}
PROMPTS = torch.tensor([[5, 9, 12, 7], [8, 3, 0, 0], [22, 14, 17, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
TARGETS = torch.tensor([[11, 1, -100], [20, 21, 1], [6, 1, -100]])
BATCH = {"input_ids": PROMPTS, "attention_mask": MASK, "labels": TARGETS}
LONG_IDS = [[3], [3, 4], [3, 4, 9], [7, 8], [7, 9, 10, 11], [12], [13, 5], [2, 2, 2]]
ONE_TOKEN_IDS = [[9], [4], [17], [2], [30], [11]]

pytestmark = pytest.mark.parametrize("name", MODELS)


@pytest.mark.parametrize(("ids", "end"), [(LONG_IDS, 1), (ONE_TOKEN_IDS, 1), (ONE_TOKEN_IDS, None)])
def test_the_search_equals_the_exact_scorer(name, ids, end):
    model, trie = MODELS[name](), Trie.build(ids, end)
    item_BK, score_BK = constrained_beam_search(model, PROMPTS, MASK, trie, len(ids))
    exact_BI = score_catalogue(model, PROMPTS, MASK, trie)
    best_BK, order_BK = exact_BI.sort(1, descending=True)
    assert item_BK.tolist() == order_BK.tolist()
    assert torch.allclose(score_BK, best_BK, atol=1e-4)
    assert float(best_BK[:, 0].sub(best_BK[:, -1]).min()) > 0.5  # the scores differ


@pytest.mark.parametrize(("ids", "end"), [(LONG_IDS, 1), (ONE_TOKEN_IDS, 1), (ONE_TOKEN_IDS, None)])
def test_log_probs_along_the_trie_are_those_of_its_tokens_alone(name, ids, end, monkeypatch):
    """The oracle: teacher-forced logits, of which only what may follow a beginning is kept."""
    monkeypatch.setattr("idgen.item_scores.MAX_LOGITS", 7)  # in pieces
    model, trie = MODELS[name](), Trie.build(ids, end)
    closed = [[*tokens, *([] if end is None else [end])] for tokens in ids]
    candidate_BM = torch.tensor([[3, 1, 0, 4, -1], [2, -1, 5, 2, 1], [0, 1, 2, 3, 5]])
    found_BM = trie_log_probs(model, PROMPTS, MASK, trie, candidate_BM)
    expected_BI = torch.zeros(len(PROMPTS), len(ids), dtype=torch.float64)
    with evaluating(model):
        for user in range(len(PROMPTS)):
            for item, tokens in enumerate(closed):
                logit_TV = teacher_forced(model, PROMPTS, MASK, user, torch.tensor([tokens]))[0].double()
                for place, token in enumerate(tokens):
                    allowed = sorted({one[place] for one in closed if one[:place] == tokens[:place] and one[place:]})
                    log_prob_C = torch.log_softmax(logit_TV[place, allowed], 0)
                    expected_BI[user, item] += log_prob_C[allowed.index(token)]
    assert torch.allclose(expected_BI.exp().sum(1), torch.ones(len(PROMPTS), dtype=torch.float64))
    assert torch.allclose(score_catalogue(model, PROMPTS, MASK, trie), expected_BI.float(), atol=1e-4)
    kept_BM = expected_BI.gather(1, candidate_BM.clamp(min=0)).masked_fill(candidate_BM < 0, -torch.inf)
    assert torch.allclose(found_BM, kept_BM, atol=1e-4)


def test_shared_beginnings_are_read_once_and_nothing_behind_the_last_choice(name):
    model, trie = MODELS[name](), Trie.build(LONG_IDS, 1)
    candidate_BM, read = torch.tensor([[0, 1, 2, 5, 6, 7], [3, 4, 3, 4, -1, 5], [5, 6, 7, -1, -1, -1]]), []
    step = type(family_of(model)).step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(family_of(model)), "step", lambda *given: (read.append(given[3]), step(*given))[1])
        trie_log_probs(model, PROMPTS, MASK, trie, candidate_BM)
    # IDs 3, 34, 349 part behind 3 and behind 34; 78 and 7 9 10 11 behind 7; the others have their first token alone
    leaf = int(trie.token_N[-1])
    assert [token_BK.tolist() for token_BK in read[1:]] == [[[3], [7], [leaf]], [[4], [leaf], [leaf]]]


def test_a_common_heading_changes_nothing(name):
    model, trie = MODELS[name](), Trie.build(LONG_IDS, 1)
    heading = torch.tensor([[13, 27, 6]]).expand(len(PROMPTS), -1)
    prompts, mask = torch.cat([heading, PROMPTS], 1), torch.cat([torch.ones_like(heading), MASK], 1)
    read, calls = model.get_input_embeddings(), []
    handle = read.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape))
    item_BK, score_BK = constrained_beam_search(model, prompts, mask, trie, 4)
    handle.remove()
    if name != "t5":
        assert calls[:2] == [(1, 3), (3, 4)]  # the heading for one user, the rest for all
    same_BK = constrained_beam_search(model, prompts[:1].expand(2, -1), mask[:1].expand(2, -1), trie, 4)[1]
    assert torch.allclose(same_BK, score_BK[:1].expand(2, -1), atol=1e-4)
    for row in range(len(prompts)):
        length = int(mask[row].sum())
        alone = constrained_beam_search(model, prompts[row : row + 1, :length], mask[row : row + 1, :length], trie, 4)
        assert item_BK[row].tolist() == alone[0][0].tolist()
        assert torch.allclose(score_BK[row], alone[1][0], atol=1e-4)


def test_a_prompt_is_read_alone(name):
    model, trie = MODELS[name](), Trie.build(LONG_IDS, 1)
    together, _ = constrained_beam_search(model, PROMPTS, MASK, trie, 5)
    alone, _ = constrained_beam_search(model, PROMPTS[1:2, :2], MASK[1:2, :2], trie, 5)
    assert together[1].tolist() == alone[0].tolist()


def test_generate_writes_what_the_search_finds(name):
    """transformers' own beams, one prompt at a time: without padding, and with its own cache."""
    model, trie = MODELS[name](), Trie.build(LONG_IDS, 1)
    item_BK, score_BK = constrained_beam_search(model, PROMPTS, MASK, trie, 4)
    for user, (prompt, mask) in enumerate(zip(PROMPTS, MASK, strict=True)):
        prompt_1S = prompt[None, mask > 0]
        before = prompt_1S.shape[1] if family_of(model).continues_prompt else 1
        written = model.generate(
            input_ids=prompt_1S,
            attention_mask=torch.ones_like(prompt_1S),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=trie.max_length,
            length_penalty=0.0,
            early_stopping="never",
            eos_token_id=1,
            pad_token_id=0,
            prefix_allowed_tokens_fn=lambda _, prefix, before=before: allowed_tokens(trie, prefix[before:]),
            renormalize_logits=True,
            return_dict_in_generate=True,
            output_scores=True,
        )
        ids = [row[before:].tolist() for row in written.sequences]
        assert [row[: row.index(1)] for row in ids] == [LONG_IDS[item] for item in item_BK[user]]
        assert torch.allclose(written.sequences_scores, score_BK[user], atol=1e-4)


def test_a_target_is_predicted_from_what_stands_before_it(name):
    """Not from itself, nor from what is behind it, nor from another row of the batch."""
    model = MODELS[name]()
    family = family_of(model)

    def log_probs(labels):
        with torch.no_grad():
            hidden_RD, _ = family.predictions(model, {**BATCH, "labels": labels})
            return family.token_logits(model, hidden_RD).log_softmax(-1)

    before_RV = log_probs(TARGETS)
    places = (TARGETS != -100).nonzero().tolist()
    for row, first in places:
        changed_BT = TARGETS.clone()
        changed_BT[row, first:] = torch.where(TARGETS[row, first:] == -100, -100, (TARGETS[row, first:] + 13) % 40)
        moved_R = (log_probs(changed_BT) - before_RV).abs().amax(1)
        behind_R = torch.tensor([user == row and place > first for user, place in places])
        assert not behind_R.any() or float(moved_R[behind_R].min()) > 1e-2
        assert float(moved_R[~behind_R].max()) < 1e-5


def word_tokenizer(num_tokens):
    words = ["<pad>", "</s>", *(f"w{number}" for number in range(2, num_tokens))]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="</s>")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("tied", [True, False])
def test_a_table_is_cut_to_the_tokenizer_at_both_ends(name, tied, tmp_path):
    """And an adapter of the output loads, in plain peft, on what was saved.

    The config of a T5 always says that they are tied, also where they are not, as in flan-t5.
    """
    wide = MODELS[name](tie_word_embeddings=tied)
    if not tied:
        wide.lm_head.weight = torch.nn.Parameter(torch.randn(40, 16, generator=torch.Generator().manual_seed(2)))
    wide.save_pretrained(tmp_path / "wide")
    model = load_backbone(tmp_path / "wide", word_tokenizer(33))
    inputs = family_of(model).plain_inputs(BATCH)
    with torch.no_grad():
        logit_BSV = model(**inputs).logits
        assert torch.allclose(logit_BSV, wide(**inputs).logits[..., :33], atol=1e-5)
    model.save_pretrained(tmp_path / "cut")
    again = load_backbone(tmp_path / "cut", word_tokenizer(33))
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, logit_BSV)
    for one in (model, again):
        assert one.lm_head.weight.shape == one.get_input_embeddings().weight.shape == (33, 16)
        assert (one.lm_head.weight is one.get_input_embeddings().weight) is tied
    adapted = attach_lora(again, LoraSettings(rank=2, targets=("output",)))
    _, own_b = adapter_parameters(adapted)
    torch.nn.init.normal_(own_b, generator=torch.Generator().manual_seed(1))
    (tmp_path / "adapter").mkdir()
    save_peft_folder(read_pair(adapted), tmp_path / "adapter", "base", family_of(model).task_type)
    plain = getattr(transformers, family_of(model).auto_class).from_pretrained(tmp_path / "cut")
    with torch.no_grad():
        found_BSV = load_adapter(plain, tmp_path / "adapter").eval()(**inputs).logits
        assert torch.allclose(found_BSV, adapted.eval()(**inputs).logits, atol=1e-4)
        assert float((found_BSV - logit_BSV).abs().max()) > 0.1


def test_a_tokenizer_of_another_model_is_refused(name, tmp_path):
    MODELS[name]().save_pretrained(tmp_path)
    for num_tokens in (41, 19):
        with pytest.raises(ValueError, match=f"40 token embeddings but the tokenizer {num_tokens} tokens"):
            load_backbone(tmp_path, word_tokenizer(num_tokens))
    assert load_backbone(tmp_path, word_tokenizer(20)).config.vocab_size == 20


def test_the_loss_is_that_of_transformers(name):
    model = MODELS[name]()
    family = family_of(model)
    loss = sequence_loss(model, BATCH)
    with torch.no_grad():
        logit_BTV = model(**family.plain_inputs(BATCH)).logits
        hidden_RD, target_R = family.predictions(model, BATCH)
        logit_RV = family.token_logits(model, hidden_RD)
    assert target_R.tolist() == TARGETS[TARGETS != -100].tolist()
    assert num_targets(BATCH) == len(target_R)
    assert torch.equal(labels_of(BATCH), TARGETS)
    expected = cross_entropy(logit_RV, target_R)
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-5)
    flat = logit_BTV.flatten(0, 1)
    assert all(bool(((flat - row).abs().amax(1) < 1e-3).any()) for row in logit_RV)
    own = model(**BATCH).loss if name == "t5" else model(**rows(BATCH)).loss
    assert float(own.detach()) == pytest.approx(float(expected), abs=1e-5)


def test_half_depth(name):
    """Layers pair off, only the paired ones are trained, and both losses fall."""
    teacher = MODELS[name]()
    family, depths = family_of(teacher), family_of(teacher).depths(teacher.config)
    student, pairs = build_student(teacher), pairs_of(teacher)
    assert family.depths(student.config) == {stack: (layers + 1) // 2 for stack, layers in depths.items()}
    assert len(pairs) == sum(layers // 2 for layers in depths.values())
    before = pair_losses(teacher, student, pairs, BATCH)
    parameters = [parameter for pair in pairs for parameter in pair_parameters(student, pair)]
    optimiser = torch.optim.AdamW(parameters, lr=3e-3)
    for _ in range(20):
        optimiser.zero_grad()
        pair_losses(teacher, student, pairs, BATCH).sum().backward()
        optimiser.step()
    assert (pair_losses(teacher, student, pairs, BATCH) < 0.9 * before).all()
    first = float(finetune_loss(teacher, student, BATCH, kl_weight=1.0).detach())
    for _ in range(10):
        optimiser.zero_grad()
        loss = finetune_loss(teacher, student, BATCH, kl_weight=1.0)
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < first


def test_a_saved_student_loads_with_its_depth(name, tmp_path):
    student = build_student(MODELS[name]())
    student.save_pretrained(tmp_path)
    family = family_of(student)
    again = getattr(transformers, family.auto_class).from_pretrained(tmp_path)
    assert family_of_config(again.config) is family
    assert getattr(again.config, SIZES[name]) == getattr(student.config, SIZES[name])
    with torch.no_grad():
        inputs = family.plain_inputs(BATCH)
        assert torch.equal(again(**inputs).logits, student(**inputs).logits)


@pytest.mark.parametrize("roles", [("attention",), ("feed_forward", "output"), ("attention", "output")])
def test_adapters_by_role_learn_and_load_in_plain_peft(name, roles, tmp_path):
    model = attach_lora(MODELS[name](), LoraSettings(rank=3, targets=roles))
    family = family_of(model)
    optimiser = torch.optim.AdamW(adapter_parameters(model), lr=1e-2)
    start = float(sequence_loss(model, BATCH).detach())
    for _ in range(5):
        optimiser.zero_grad()
        sequence_loss(model, BATCH).backward()
        assert all(bool(parameter.grad.isfinite().all()) for parameter in adapter_parameters(model))
        optimiser.step()
    assert float(sequence_loss(model, BATCH).detach()) < start
    assert all(bool(parameter.grad.any()) for parameter in adapter_parameters(model))
    save_peft_folder(read_pair(model), tmp_path, "base", family.task_type)
    plain = load_adapter(MODELS[name](), tmp_path).eval()
    inputs = family.plain_inputs(BATCH)
    with torch.no_grad():
        assert torch.allclose(plain(**inputs).logits, model.eval()(**inputs).logits, atol=1e-4)


def test_another_model_is_refused(name):
    with pytest.raises(ValueError, match="got a BertModel"):
        family_of(BertModel(BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1)))
    config = MODELS[name]().config
    config.architectures, config.model_type = ["BertModel"], "bert"
    with pytest.raises(ValueError, match=r"of type 'bert' \(BertModel\)"):
        family_of_config(config)


def test_some_outputs_of_an_adapter_that_peft_loaded(name):
    """The output layer of a hand-over is peft's own: its rows hold the adapter, too."""
    model = get_peft_model(MODELS[name](), LoraConfig(r=2, lora_alpha=6, target_modules=["lm_head"]))
    head, family = model.get_base_model().lm_head, family_of(model)
    torch.nn.init.normal_(head.lora_B["default"].weight, generator=torch.Generator().manual_seed(0))
    hidden_RD, token_C = (
        torch.randn(3, head.in_features, generator=torch.Generator().manual_seed(1)),
        torch.tensor([9, 4]),
    )
    with torch.no_grad():
        adapted = family.token_logits(model.get_base_model(), hidden_RD, token_C)
        assert torch.allclose(adapted, family.token_logits(model.get_base_model(), hidden_RD)[:, token_C], atol=1e-5)
        with model.disable_adapter():
            plain = family.token_logits(model.get_base_model(), hidden_RD, token_C)
            whole = family.token_logits(model.get_base_model(), hidden_RD)
    assert torch.allclose(plain, whole[:, token_C], atol=1e-5)
    assert (adapted - plain).abs().max() > 0.01
