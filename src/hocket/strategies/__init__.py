"""Layer 3, the strategies of distributed training: what workers exchange, and when."""
