"""Mathematics shared by two mechanisms or more: functions of tensors, nothing but torch below them."""
