"""Maps of single tokens to features: values that print, positive maps, FAVOR's random draws."""
