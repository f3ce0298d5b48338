/* A set of free stretches ordered by (bytes, address), for best fit: the smallest that is large enough, the lowest address
 * among equals. A treap with nodes inside the objects it orders; priorities are a hash of the address, so the same
 * stretches always make the same tree. */
#ifndef PTN_MEMORY_FIT_TREE_H
#define PTN_MEMORY_FIT_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct ptn_fit_node {
  struct ptn_fit_node *left, *right;
  size_t bytes;
  uintptr_t address;
} ptn_fit_node;

typedef struct ptn_fit_tree {
  ptn_fit_node *root;
} ptn_fit_tree;

/* bytes and address of the node are set before, and stay as they are while it is in a tree. Addresses differ. */
void ptn_fit_insert(ptn_fit_tree *tree, ptn_fit_node *node);
void ptn_fit_remove(ptn_fit_tree *tree, ptn_fit_node *node);
static inline bool ptn_fit_before(const ptn_fit_node *node, size_t bytes, uintptr_t address) {
  return node->bytes < bytes || (node->bytes == bytes && node->address < address);
}
/* The first node at or after (bytes, address), or NULL. */
ptn_fit_node *ptn_fit_find(const ptn_fit_tree *tree, size_t bytes, uintptr_t address);

#endif
