"""What the heads do: the attention of a real model, computed by the specification."""
