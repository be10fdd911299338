"""Operations on rows of vectors: Matryoshka cuts, quantization, matrices of unequal length."""
