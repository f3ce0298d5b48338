/* What the core needs from a device: so far, where pages come from.
 *
 * The arena decides what lives where; a page source only reserves ranges of addresses, takes memory back from a part of
 * one, and puts a part on huge pages. A reserved range costs nothing until it is written to; a purged part costs nothing
 * until it is written to again, and then reads as zeros.
 */
#ifndef PTN_DEVICE_DEVICE_H
#define PTN_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct ptn_page_source {
  /* Reserves at least least_bytes of addresses, wished_bytes where they are free of cost (both multiples of PTN_PAGE_BYTES);
   * *out is a multiple of PTN_HUGE_BYTES and *got_bytes of PTN_PAGE_BYTES. PTN_MEMORY when refused. */
  ptn_status (*reserve)(size_t least_bytes, size_t wished_bytes, size_t *got_bytes, void **out);
  void (*unreserve)(void *begin, size_t bytes);
  /* Gives the memory of whole pages back; what they held is lost. False when the system refuses (locked memory). */
  bool (*purge)(void *begin, size_t bytes);
  /* Multiples of PTN_HUGE_BYTES. Allowed: the next write to any byte may make a whole huge page resident. Ranges start
   * disallowed. A hint: a system without huge pages does nothing. */
  void (*allow_huge)(void *begin, size_t bytes, bool allowed);
  /* Of one huge page, at a multiple of PTN_HUGE_BYTES: allows it, and moves there at once what lies in small pages; bytes stay as
   * they are, whoever uses them meanwhile. All of it is resident then. A hint, as above, and where the system cannot do it now
   * (a device is using the pages) it may do so later. */
  void (*gather_huge)(void *begin);
} ptn_page_source;

const ptn_page_source *ptn_host_pages(void);

#endif
