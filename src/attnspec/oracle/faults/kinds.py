"""The kinds of faults: what each one is, the smallest input that can show it, and where it was seen."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: its name.
        family: which part of attention it is in.
        meaning: what is wrong, in one sentence.
        witness: the smallest input that can show it; all numbers in it are different.
        threads: public threads in which it was seen, as owner/repo#number.
    """

    name: str
    family: str
    meaning: str
    witness: str
    threads: tuple[str, ...] = ()


def _kind(name: str, family: str, meaning: str, witness: str, threads: str) -> Kind:
    return Kind(name, family, meaning, witness, tuple(threads.split()))


_ALL = (
    _kind(
        "head_split_merge_order", "layout",
        "Heads are split off or joined by a bare reshape, without moving the axis of tokens and that of heads past each other, so each "
        "head gets pieces of several tokens.",
        "one sample, seq 2, h=2, d_k=1",
        "reczoo/FuxiCTR#30 jsbaan/transformer-from-scratch#6 jsbaan/transformer-from-scratch#4 huggingface/diffusers#10303",
    ),
    _kind(
        "batch_axis_mixup", "layout",
        "The axis of samples is taken for that of heads or of tokens, so samples get each other's numbers.",
        "batch 2, h=2, one token, d_k=1; where batch and tokens are exchanged, batch 2 with one token each",
        "gazelle93/Transformer-Various-Positional-Encoding#1 aipixel/AEMatter#3",
    ),
    _kind(
        "head_seq_axis_swap", "layout",
        "The axes of heads and of tokens are exchanged, so heads attend to heads instead of tokens to tokens.",
        "one sample, seq 2, h=1",
        "facebookresearch/xformers#922 AMD-AGI/Primus-Turbo#304 facebookresearch/xformers#761 facebookresearch/xformers#967 "
        "InternLM/lmdeploy#2957 triton-lang/triton#2626",
    ),
    _kind(
        "heads_not_separated", "layout",
        "All heads share one score map or one softmax, so there is one head however many are asked for.",
        "h=2 with one key for a shared softmax; h=2 with one query and two keys for shared scores",
        "kornia/kornia#2186 facebookresearch/detr#247 IBM/PoWER-BERT#11 LeapLabTHU/Circulant-Attention#3",
    ),
    _kind(
        "qkv_pack_order", "layout",
        "A fused projection is cut apart in another order than it was packed: all queries first, or head by head, or group by group.",
        "h=2, d_k=1, all rows of the weight different",
        "awslabs/slapo#46 NVIDIA/apex#1131 tenstorrent/tt-metal#32407 alibaba/ChatLearn#277 tenstorrent/tt-metal#41719",
    ),
    _kind(
        "noncontiguous_misread", "layout",
        "Strides are ignored: an array that is a view of another is read as if it lay in one piece.",
        "h=2, two keys, the values given as a transposed view",
        "pytorch/pytorch#187506 pytorch/pytorch#112577 pytorch/pytorch#116333 pytorch/pytorch#127523",
    ),
    _kind(
        "operand_routing", "projection",
        "The wrong array or weight is used for queries, keys or values.",
        "one query and one key where keys and values are exchanged; else cross-attention with three different sources",
        "tenstorrent/tt-mlir#8958 tensorflow/tensorflow#35859 stevezheng23/sequence_labeling_tf#81 "
        "stevezheng23/reading_comprehension_tf#284 zju3dv/LoFTR#176 pinellolab/DNA-Diffusion#235",
    ),
    _kind(
        "projection_bias", "projection",
        "The bias of a projection is missing, or added where none was asked for.",
        "one query, one key, b_v or b_o not zero",
        "pytorch/pytorch#52257 pytorch/pytorch#97128 pytorch/pytorch#52545 pytorch/pytorch#88669 stevezheng23/sequence_labeling_tf#83",
    ),
    _kind(
        "gqa_head_mapping", "grouping",
        "Query heads read the wrong key/value head, or keys and values are repeated along the wrong axis or not at all.",
        "h=4, h_kv=2, one query, one key, d_k=1",
        "onnx/onnx#7274 apple/axlearn#842 PrimeIntellect-ai/prime-rl#2681 state-spaces/mamba#462 OptimalScale/LMFlow#681 jxiw/M1#4 "
        "vllm-project/vllm#17476",
    ),
    _kind(
        "scale_wrong_dim", "scale",
        "Scores are divided by the root of another size than d_k: the model's width, the number of heads, the width of values or a "
        "padded width.",
        "one query, two keys, h=2, d_k=2",
        "lucidrains/vit-pytorch#65 juho-lee/set_transformer#18 bytedance-iaas/sglang#485 FrancescoSaverioZuppichini/ViT#1 "
        "aladdinpersson/Machine-Learning-Collection#65 Graylab/DL4Proteins-notebooks#12 FareedKhan-dev/train-llm-from-scratch#3",
    ),
    _kind(
        "scale_missing_or_double", "scale",
        "Scores are not scaled at all, scaled twice, or multiplied where they should be divided.",
        "one query, two keys, d_k=2; with d_k=1 it cannot show",
        "mlc-ai/mlc-llm#3426 huggingface/transformers#38290 PAIR-code/tiny-transformers#71 AI-Hypercomputer/maxtext#1349 "
        "ml-explore/mlx-examples#1013",
    ),
    _kind(
        "scale_option_ignored", "scale",
        "A scale that the caller gives is not passed on, or a default takes its place.",
        "one query, two keys, a scale other than the default",
        "huggingface/pytorch-image-models#2280 tenstorrent/tt-metal#33304 tracel-ai/burn-onnx#453 InternLM/xtuner#873 "
        "nntile/nntile#356",
    ),
    _kind(
        "scale_wrong_place", "scale",
        "The factor is applied after the softmax, or also to what is added to the scores.",
        "one query, two keys, d_k=2, a finite bias",
        "FrancescoSaverioZuppichini/ViT#2 tenstorrent/tt-metal#56406",
    ),
    _kind(
        "softmax_wrong_axis", "softmax",
        "The softmax runs over queries, samples or heads instead of keys.",
        "one query, two keys",
        "labmlai/annotated_deep_learning_paper_implementations#146 FudanNLP/fastNLP#254 nerminnuraydogan/vision-transformer#1 "
        "gjylt/DoubleAttentionNet#3 catalyst-team/catalyst#285 stevezheng23/reading_comprehension_tf#30",
    ),
    _kind(
        "softmax_denominator", "softmax",
        "What a row is divided by is wrong: a sink counted wrongly, parts of the row put together wrongly, columns of padding counted, "
        "or another base of the exponential.",
        "two keys in two chunks; three keys in tiles of two",
        "huggingface/transformers#41083 HKUSTDial/flash-sparse-attention#106 pytorch/pytorch#196678 pie-project/pie#272 "
        "ml-explore/mlx#3452 Dao-AILab/flash-attention#2752",
    ),
    _kind(
        "softcap_order_or_missing", "softmax",
        "Scores are limited by the tanh after the mask instead of before it, or not at all.",
        "one query, two keys, one of them dropped, softcap=1",
        "onnx/onnx#7865 vllm-project/vllm-metal#665 EricLBuehler/mistral.rs#1930 onnx/onnx#7867",
    ),
    _kind(
        "mask_polarity_inverted", "mask",
        "Kept and dropped are exchanged in the mask.",
        "one query, two keys, one of them dropped",
        "lucidrains/x-transformers#160 pytorch/pytorch#86120",
    ),
    _kind(
        "mask_type_confusion", "mask",
        "A mask of True and False is added to the scores as 1 and 0, or a mask of numbers is turned into True and False.",
        "one query, two keys; a mask of finite numbers that are not zero",
        "huggingface/transformers#41443 ml-explore/mlx#2626 nishide-dev/unturtle#56 ml-explore/mlx-swift#275 "
        "HKUSTDial/flash-sparse-attention#146",
    ),
    _kind(
        "mask_after_softmax", "mask",
        "The weights are masked instead of the scores, so those that stay no longer add up to 1.",
        "one query, two keys, one of them dropped; add up the row",
        "huggingface/pytorch-image-models#2236 lucidrains/memory-compressed-attention#2 autosome-ru/vigg_ribonanza#1",
    ),
    _kind(
        "mask_wrong_axis", "mask",
        "The padding of keys is applied along the axis of queries.",
        "two queries, two keys, the last key padded",
        "hyunwoongko/transformer#40 lucidrains/x-transformers#172",
    ),
    _kind(
        "mask_batch_head_tiling", "mask",
        "The mask is repeated for the heads in the other order, so heads get the masks of other samples.",
        "batch 2, h=2, one query, two keys, another mask for each sample",
        "ArrowLuo/CLIP4Clip#22 lsdefine/attention-is-all-you-need-keras#36 jchengai/pluto#38 "
        "lsdefine/attention-is-all-you-need-keras#28 huggingface/diffusers#3023 junliu621/PPLM#6",
    ),
    _kind(
        "mask_not_applied", "mask",
        "The mask is lost in one way of calling, one step or one part, or the mask of something else is used.",
        "one query, two keys, one of them dropped, in every way of calling",
        "keras-team/keras-hub#2186 AnswerDotAI/ModernBERT#40 lucidrains/audiolm-pytorch#69 pytorch/pytorch#163314 "
        "huggingface/diffusers#2656 huggingface/diffusers#1890 jamesmullenbach/caml-mimic#13 tensorflow/tensorflow#512 "
        "tensorflow/tensorflow#43941 sooftware/conformer#50",
    ),
    _kind(
        "mask_combination", "mask",
        "Of several masks that apply at once, one replaces another instead of both holding.",
        "two queries, two keys, causal and a mask of one's own",
        "huggingface/transformers#35855 pytorch/pytorch#187966 huggingface/nanoVLM#80 pytorch/pytorch#118972",
    ),
    _kind(
        "mask_finite_fill", "mask",
        "Dropped scores get a finite number instead of minus infinity, which low scores can fall below and several masks can add up.",
        "one query, two keys, the kept score below the fill",
        "karpathy/minGPT#75 microsoft/onnxruntime#14363 huggingface/transformers#18185 huggingface/transformers#17121 "
        "ai-glimpse/toynlp#50",
    ),
    _kind(
        "mask_construction", "mask",
        "A legal mask is refused or laid on the wrong axes because of its shape, or a mask is derived wrongly from the data.",
        "h=2, two queries, two keys, a mask with an axis of heads",
        "pytorch/pytorch#97409 tensorflow/tensorflow#60626 Kyubyong/transformer#69 pytorch/pytorch#97605 google-deepmind/dm-haiku#202 "
        "llvm/torch-mlir#3824",
    ),
    _kind(
        "causal_alignment", "causal",
        "Where there are fewer or more queries than keys, the causal triangle starts at the wrong corner.",
        "one query, two keys",
        "pytorch/pytorch#103082 google/flax#5591 EleutherAI/gpt-neox#1178 NVIDIA/TransformerEngine#399 Dao-AILab/flash-attention#1778 "
        "onnx/onnx#7297 Dao-AILab/flash-attention#20 Dao-AILab/flash-attention#436 pytorch/pytorch#108108 microsoft/onnxruntime#27992",
    ),
    _kind(
        "causal_dropped_or_forced", "causal",
        "Causality is switched off or on by something that has nothing to do with it: another option, a way of calling, a cache.",
        "two queries, two keys, with every combination of options",
        "pytorch/pytorch#99282 facebookresearch/xformers#103 facebookresearch/fairseq2#59 paiml/entrenar#310 "
        "huggingface/transformers#36150 Mikyx-1/TinyLLM#18 pytorch/pytorch#172338 candle-org/candle#105 NVIDIA/TransformerEngine#3528",
    ),
    _kind(
        "causal_geometry", "causal",
        "The causal triangle is transposed, shifted, or decided for blocks of rows at once.",
        "two queries, two keys",
        "pytorch/pytorch#29546 PaddlePaddle/flash-attention#48",
    ),
    _kind(
        "window_off_by_one", "window",
        "The sliding window is one key too wide or too narrow at an edge.",
        "a window of one key, two queries, two keys",
        "huggingface/transformers#39408 ml-explore/mlx-lm#390 openvinotoolkit/openvino#30714",
    ),
    _kind(
        "window_wrong_region", "window",
        "The window lies on the wrong side or around the wrong centre, or widens what another rule allows.",
        "a window of one key, three queries, three keys; two more queries than keys",
        "huggingface/transformers#41228 Dao-AILab/flash-attention#895 vllm-project/vllm#34570 sgl-project/sglang#1106",
    ),
    _kind(
        "fully_masked_row", "nonfinite",
        "A query that may attend to no key gets NaN, zeros or an average where something else was promised, in the output or in the "
        "gradient.",
        "one query, one key, dropped",
        "pytorch/pytorch#103749 pytorch/pytorch#109517 Xilinx/brevitas#1591 pytorch/pytorch#103963 pytorch/pytorch#27968 "
        "ml-explore/mlx#2608 robertknight/rten#1321 lucidrains/nGPT-pytorch#11",
    ),
    _kind(
        "nonfinite_propagation", "nonfinite",
        "NaN in a dropped key or value reaches the output, or NaN in a kept one vanishes.",
        "one query, two keys, NaN in the value of the dropped one",
        "pytorch/pytorch#101967 pytorch/pytorch#141128",
    ),
    _kind(
        "precision_range", "nonfinite",
        "Numbers or constants leave the range of float16 or bfloat16, or products are computed in less precision than the inputs have.",
        "float16, one query, two keys, d_k=1, queries and keys of 300",
        "huggingface/transformers#17306 ahrefs/ocannl#548 huggingface/transformers#17437 huggingface/transformers#18057 "
        "pytorch/pytorch#163588",
    ),
    _kind(
        "rope_pairing", "position",
        "The rotation pairs channels, orders angles or cuts the rotated width in a way that does not fit together.",
        "d_k=4, two keys, the second at position 1; does the rotation keep lengths?",
        "raiyanyahya/how-to-train-your-gpt#7 vllm-project/vllm-metal#44 pie-project/pie#603 nntile/nntile#382 "
        "labmlai/annotated_deep_learning_paper_implementations#215 rasbt/LLMs-from-scratch#750",
    ),
    _kind(
        "rope_position", "position",
        "The rotation is given the wrong position, above all where a cache holds earlier tokens.",
        "one key in the cache and one new token",
        "Blaizzy/mlx-vlm#1983 skyzh/tiny-llm#46 NVIDIA/Megatron-LM#453 pytorch/executorch#2010 scouzi1966/maclocal-api#92 "
        "Comfy-Org/ComfyUI#15698",
    ),
    _kind(
        "rope_wrong_axis", "position",
        "The angle of the rotation runs over the heads instead of the tokens, so positions have no effect.",
        "two queries, two keys",
        "facebookresearch/xformers#841",
    ),
    _kind(
        "additive_position_bias", "position",
        "A bias for positions has wrong slopes, a wrong origin, a wrong index, or is that of something else.",
        "one query, two keys; h=3 for slopes",
        "paiml/aprender#2143 huggingface/candle#899 huggingface/transformers#4499 lucidrains/x-transformers#298 "
        "NVIDIA/TensorRT-LLM#13870 guillaume-be/rust-bert#171 Dao-AILab/flash-attention#907",
    ),
    _kind(
        "cache_extent", "cache",
        "Slots of the cache that hold nothing are attended to, or slots that hold keys are left out or shifted.",
        "room for two keys, one of them filled",
        "huggingface/transformers#30414 onnxruntime/mobius#365 sgl-project/sglang#8675 tenstorrent/tt-metal#54413",
    ),
    _kind(
        "cache_structure", "cache",
        "The cache as a whole goes wrong: how it is set up, reordered, refreshed, or what is thrown out.",
        "two steps, batch 2",
        "google/flax#3576 facebookresearch/fairseq2#307 rajveer43/VeloxQuant-MLX#392 google/flax#3571 NVIDIA-NeMo/Speech#4859",
    ),
    _kind(
        "dropout_mode", "dropout",
        "Weights are dropped in evaluation, or not in training.",
        "a rate of one half, two keys, two calls",
        "huggingface/pytorch-image-models#1978 wenet-e2e/wenet#2699 NVIDIA/torch-harmonics#221 MagellaX/StreamAttn#28 "
        "coleygroup/ms-pred#38 meta-pytorch/torchtune#1803 facebookresearch/vjepa2#160 pytorch/pytorch#124464 pytorch/pytorch#88806",
    ),
    _kind(
        "dropout_arithmetic", "dropout",
        "What survives dropout is scaled wrongly, dropout comes at the wrong place, or the backward pass drops others than the forward "
        "pass.",
        "a rate of one half, two keys, given survivors, and finite differences",
        "NVIDIA/apex#816 nikhilbarhate99/min-decision-transformer#2",
    ),
    _kind(
        "returned_weights", "outputs",
        "The weights that are returned are averaged, summed or changed otherwise than was asked for.",
        "h=2, two keys",
        "pytorch/pytorch#42929 facebookresearch/fairseq#3365 pytorch/pytorch#90842 pytorch/pytorch#33360 facebookresearch/fairseq#351",
    ),
    _kind(
        "output_shape", "outputs",
        "The output has another length than the queries.",
        "one sample, two tokens, the last one padded, in evaluation",
        "pytorch/pytorch#97111 pytorch/pytorch#100113",
    ),
    _kind(
        "gradient_wrong", "gradient",
        "The gradient is not that of the function computed.",
        "one query, two keys, d_k=2; two query heads on one key/value head where they are grouped",
        "marin-community/levanter#449 Dao-AILab/flash-attention#443 ooples/AiDotNet.Tensors#49 tenstorrent/tt-metal#53207 "
        "huggingface/diffusers#14341 pytorch/pytorch#119320 pytorch/pytorch#133671 fla-org/flash-linear-attention#384",
    ),
    _kind(
        "gradient_missing", "gradient",
        "An input gets no gradient, always or only when others need none.",
        "a gradient for each of queries, keys, values and bias alone",
        "huggingface/candle#3724 pytorch/pytorch#188302",
    ),
    _kind(
        "index_overflow", "addressing",
        "Offsets into large arrays do not fit into 32 bits and wrap around.",
        "an array of more than two thousand million elements, or the same arithmetic with a small modulus",
        "pytorch/pytorch#187227 ggml-org/llama.cpp#24912 pytorch/pytorch#162588 Dao-AILab/flash-attention#2260 "
        "NVIDIA/FasterTransformer#524",
    ),
    _kind(
        "ragged_packing", "ragged",
        "Sequences of different lengths that are packed into one see each other, or are cut at the wrong places.",
        "two packed tokens of different documents; a mask with a hole; other numbers of queries than of keys",
        "huggingface/transformers#46634 vllm-project/vllm-omni#5865 pytorch/pytorch#139462 huggingface/transformers#25452 "
        "alex-hh/profam#495 hiyouga/LlamaFactory#7754 allenai/open-instruct#669",
    ),
    _kind(
        "head_mask_prune", "heads",
        "A head that is switched off or pruned is not taken out of every array that has an axis of heads.",
        "h=3, the first head pruned",
        "huggingface/transformers#10540 intel/neural-compressor#525 huggingface/transformers#10605 huggingface/transformers#4798 "
        "huggingface/transformers#4799",
    ),
)  # fmt: skip

KINDS = {kind.name: kind for kind in _ALL}
"""All kinds by name, in the order of families."""


OTHER: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        _kind("variant", "operator", "A step more than was declared, which may be meant: then the policy can say so.", "any", ""),
        _kind(
            "activation", "projection", "Queries, keys, values or the output go through an activation.", "one token, b_v of both signs", ""
        ),
        _kind("large_scores", "nonfinite", "Where scores are as large as 1e5, masks and softmax lose what they should keep.", "any", ""),
        _kind("inputs_modified", "outputs", "A call writes into its inputs.", "any", ""),
        _kind("state", "outputs", "A call leaves something behind that changes the next one.", "two calls", ""),
        _kind("result_dtype", "outputs", "The output does not have the dtype of the inputs.", "float32", ""),
        _kind("bad_shape_accepted", "outputs", "Inputs that do not fit together are broadcast, not refused.", "seq_k 2 beside 1", ""),
        _kind("crash", "isolation", "It raises an error, or ends the process.", "any", ""),
        _kind("exit", "isolation", "It leaves the process.", "any", ""),
        _kind("hang", "isolation", "It does not come to an end in time.", "any", ""),
        _kind("memory", "isolation", "It takes more memory than it may.", "any", ""),
        _kind("unknown", "operator", "It is not attention as declared, and no fault that is known explains it.", "any", ""),
    )
}
"""What else a report may name: what is no fault of attention, or has not been seen in public."""
