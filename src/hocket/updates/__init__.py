"""How one step of an optimizer is divided: by elements, by whole tensors."""
