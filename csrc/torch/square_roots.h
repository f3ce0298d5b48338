/* The square roots of torch.sqrt. */
#ifndef PTN_TORCH_SQUARE_ROOTS_H
#define PTN_TORCH_SQUARE_ROOTS_H

/* Updates that are not fused take them from now on (optim.h). Nothing where torch's are rounded correctly. */
void ptn_torch_use_square_roots(void);

#endif
