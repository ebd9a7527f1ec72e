"""Every mechanism, one file each. A new mechanism is exported by one line here; everything else finds it."""

from fast_attention.mechanisms.softmax import Softmax as Softmax
