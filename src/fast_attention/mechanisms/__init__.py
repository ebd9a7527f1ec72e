"""Every mechanism, one file each. A new mechanism is exported by one line here; everything else finds it."""

from fast_attention.mechanisms.softmax import Softmax as Softmax
from fast_attention.mechanisms.local import BlockLocal as BlockLocal
from fast_attention.mechanisms.local import Local as Local
