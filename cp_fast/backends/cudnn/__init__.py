"""Backend "cudnn": cuDNN's fused attention."""
