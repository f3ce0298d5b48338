/* See fit_tree.h. Invariants: in-order (bytes, address) strictly rises; a node's priority is not below its children's. */
#include "memory/fit_tree.h"

static uint64_t priority(const ptn_fit_node *node) {
  uint64_t x = (uint64_t)node->address * 0x9E3779B97F4A7C15u;
  return x ^ (x >> 32);
}

void ptn_fit_insert(ptn_fit_tree *tree, ptn_fit_node *node) {
  ptn_fit_node **place = &tree->root;
  uint64_t mine = priority(node);
  while (*place && priority(*place) >= mine)
    place = ptn_fit_before(*place, node->bytes, node->address) ? &(*place)->right : &(*place)->left;
  ptn_fit_node *rest = *place, **less = &node->left, **more = &node->right;
  *place = node;
  while (rest) { /* the subtree below is split at the new node */
    if (ptn_fit_before(rest, node->bytes, node->address)) {
      *less = rest;
      less = &rest->right;
      rest = rest->right;
    } else {
      *more = rest;
      more = &rest->left;
      rest = rest->left;
    }
  }
  *less = *more = NULL;
}

void ptn_fit_remove(ptn_fit_tree *tree, ptn_fit_node *node) {
  ptn_fit_node **place = &tree->root;
  while (*place != node) place = ptn_fit_before(*place, node->bytes, node->address) ? &(*place)->right : &(*place)->left;
  ptn_fit_node *less = node->left, *more = node->right;
  while (less && more) {
    if (priority(less) >= priority(more)) {
      *place = less;
      place = &less->right;
      less = less->right;
    } else {
      *place = more;
      place = &more->left;
      more = more->left;
    }
  }
  *place = less ? less : more;
}

ptn_fit_node *ptn_fit_find(const ptn_fit_tree *tree, size_t bytes, uintptr_t address) {
  ptn_fit_node *node = tree->root, *best = NULL;
  while (node) {
    if (ptn_fit_before(node, bytes, address)) {
      node = node->right;
    } else {
      best = node;
      node = node->left;
    }
  }
  return best;
}
