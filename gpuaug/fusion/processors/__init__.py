"""Image processors of transformers: their settings, the sizes and order of their outputs, and the module that runs them."""
