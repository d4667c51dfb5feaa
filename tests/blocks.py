"""The blocks of the model files, in small, as overrides of a run."""

LLAMA = ["model.norm=rmsnorm", "model.position=rope", "model.mlp=swiglu", "model.bias=false", "model.n_layer=2"]
BLOCKS = {
    "llama": LLAMA,  # llama_124m, llama_350m
    "grouped": [*LLAMA, "model.n_kv_head=1", "model.rope_theta=5e5"],  # llama_1b, smollm2_135m
    "qwen3": [*LLAMA, "model.n_kv_head=1", "model.head_dim=12", "model.qk_norm=head"],
    "olmo2": [*LLAMA, "model.qk_norm=all", "model.residual_norm=post", "model.tied=false"],
    "nanochat": [*LLAMA, "model.norm_weight=false", "model.qk_norm=head", "model.mlp=relu2", "model.tied=false",
                 "model.logit_softcap=15"],
    "all else": [*LLAMA, "model.norm=layernorm", "model.mlp=geglu", "model.residual_norm=pre_post", "model.window=5",
                 "model.window_every=2", "model.dropout=0.1", "data.document_mask=true", "train.z_loss=1e-3"],
}  # fmt: skip
