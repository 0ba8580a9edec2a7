"""What a recipe cannot do for a training framework. Each file speaks to one, which it imports."""
