"""What low bits do to the tensors and products of linears: measures of a sample, and what they mean."""
