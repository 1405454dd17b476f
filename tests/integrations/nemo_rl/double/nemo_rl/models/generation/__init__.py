"""Settings of the generation."""


def configure_generation_config(config, tokenizer, is_eval=False, has_refit_draft_weights=False, trains_mtp=False):
    config["_pad_token_id"] = tokenizer.pad_token_id
    if config["backend"] in ("vllm", "dynamo"):
        config["vllm_cfg"]["load_format"] = "auto" if is_eval else "dummy"
    config["_mtp_weights_from_refit"] = trains_mtp
    return config
