"""From ops to passes: how a pipeline is split for images of one size, and the sizes and types of the images between passes."""
