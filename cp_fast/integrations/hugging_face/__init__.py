"""How models of Hugging Face are looked over before their sequences are spread, and what stands around their calls."""
