"""The formats of others: safetensors in the Hugging Face layout, and folders of torch.distributed.checkpoint."""
