"""``fast_attention.integrations.transformers.register()``: mechanisms by name in ``model.set_attn_implementation``."""

from fast_attention.integrations.hugging_face import register as register
from fast_attention.integrations.saving import save_pretrained as save_pretrained
from fast_attention.integrations.swapping import from_pretrained as from_pretrained
