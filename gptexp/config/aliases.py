"""Names of keys in other trainers, and what gptexp has in their place. They are only named in errors."""

# What gptexp has -> names in nanoGPT, transformers, accelerate, Lightning, torchtitan and litgpt.
_NAMES = {
    "batch.total_batch_size (tokens of a step) and batch.micro_batch_size (sequences of a rank's forward pass)":
        "batch_size bs global_batch_size train_batch_size",
    "batch.micro_batch_size, the sequences of a rank's forward pass":
        "per_device_train_batch_size per_device_batch_size local_batch_size micro_batch device_batch_size",
    "no such key: it follows from batch.total_batch_size, batch.micro_batch_size and world.size":
        "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches accumulation_steps",
    "optim.lr, the peak": "learning_rate max_lr peak_lr base_lr",
    "schedule.min_lr_ratio, a share of optim.lr": "min_lr lr_min end_lr eta_min",
    "schedule=NAME": "decay_lr lr_scheduler lr_scheduler_type scheduler",
    "schedule.warmup_tokens, schedule.warmup_ratio and schedule.warmup_steps":
        "warmup_iters warmup num_warmup_steps lr_warmup_steps warmup_iterations",
    "schedule.decay_tokens and schedule.decay_steps": "lr_decay_iters decay_iters",
    "train.max_tokens and train.max_steps": "max_iters iters num_iterations iterations num_steps steps n_steps",
    "train.epochs": "num_epochs max_epochs num_train_epochs",
    "train.eval_every_tokens and train.eval_every":
        "eval_interval eval_steps val_interval val_check_interval eval_freq",
    "data.val_tokens": "eval_iters val_steps limit_val_batches eval_size",
    "train.save_every_tokens and train.save_every": "save_steps save_interval checkpoint_interval checkpoint_every",
    "train.keep_last": "save_total_limit keep_last_n",
    "train.log_every": "log_interval logging_steps log_every_n_steps log_freq",
    "train.dtype": "amp mixed_precision precision bf16 fp16 autocast",
    "train.matmul_precision": "tf32 allow_tf32",
    "train.attention": "flash flash_attention attn_implementation use_flash_attn",
    "train.activation_checkpointing": "gradient_checkpointing activation_checkpoint",
    "optim.grad_clip": "max_grad_norm clip_grad gradient_clip_val clip max_norm",
    "optim=NAME": "optimizer optimiser opt optimizer_name",
    "optim.beta1 and optim.beta2": "adam_betas adam_beta1 adam_beta2",
    "optim.eps": "adam_epsilon epsilon",
    "optim.weight_decay": "wd",
    "gptexp resume RUN_DIR, and init_from=RUN_DIR for the weights alone":
        "resume resume_from resume_from_checkpoint ckpt_path load_checkpoint",
    "hydra.run.dir=DIR": "out_dir output_dir save_dir default_root_dir log_dir",
    "log.wandb.mode": "wandb_log report_to use_wandb logger",
    "log.wandb.project": "wandb_project project_name",
    "log.wandb.name": "wandb_run_name run_name exp_name experiment_name",
    "world.size": "gpus devices num_gpus nproc nproc_per_node num_processes world_size",
    "world.sharding": "fsdp strategy ddp zero_stage data_parallel_shard_degree",
    "no such key: tokens are read where they lie": "num_workers dataloader_num_workers",
    "model.block_size, and batch.seq_len for less":
        "context_length sequence_length max_seq_len max_length n_ctx seq_length n_positions",
    "model.n_layer": "num_layers n_layers num_hidden_layers depth",
    "model.n_head": "num_heads n_heads num_attention_heads heads",
    "model.n_embd": "d_model dim hidden_size n_embed embed_dim width",
    "model.n_kv_head": "num_key_value_heads n_kv_heads n_query_groups",
    "model.n_mlp": "d_ff intermediate_size ffn_dim hidden_dim",
    "model=NAME, and init_from=NAME for its weights": "model_name model_name_or_path pretrained",
    "data=text data.path=FILES": "dataset_name train_file data_path data_dir train_data",
}  # fmt: skip
ALIASES = {name: answer for answer, names in _NAMES.items() for name in names.split()}
