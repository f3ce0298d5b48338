/* Accounts, seen from inside the arena: who a block belongs to, and how much may be resident.
 *
 * Account structs are never freed, only used again: torch may hold the address of one for a moment after it was destroyed,
 * and a block may outlive its account. A destroyed account takes no new blocks (they are counted as nobody's) and is used
 * again when its last block is gone. Everything here is called under ptn_arena_mutex.
 */
#ifndef PTN_MEMORY_ACCOUNT_H
#define PTN_MEMORY_ACCOUNT_H

#include "base/threads.h"
#include "memory/arena.h"

#define PTN_SMALL_CLASSES 64 /* class c: slots of c * PTN_TENSOR_ALIGN_BYTES; 0 is not used */

/* Of what was taken since the begin of something whose end nobody knows a refusal names one in so many more. */
#define PTN_GROWTH_PART 2

struct ptn_slab;

struct ptn_account {
  ptn_account *next; /* among those that may be used again */
  bool open;         /* between create and destroy */
  uint64_t limit_bytes; /* as long as it is open */
  _Atomic uint64_t goal_bytes; /* set and read without the lock, as the next two */
  _Atomic uint64_t named_bytes, grown_from_bytes;
  _Atomic uint64_t live_bytes; /* changed with it, and read without it by who asks for room */
  uint64_t peak_bytes, interval_peak_bytes, refused_count, refused_bytes, block_count;
  uint64_t charged_bytes; /* of the live ones: not the arena's, in none of the totals */
  ptn_pressure pressure;
  void *context;
  uint64_t asking_count; /* calls of pressure that are under way */
  struct ptn_slab *open_slabs[PTN_SMALL_CLASSES]; /* with free slots */
};

extern ptn_mutex ptn_arena_mutex;

typedef struct ptn_account_totals {
  uint64_t live_bytes;           /* of all accounts and of nobody */
  uint64_t unlimited_live_bytes; /* of those without a limit */
  uint64_t limit_bytes;          /* sum of the limits */
  uint64_t limited_count;        /* accounts with a limit */
  uint64_t high_water_bytes;     /* highest live_bytes since the last trim */
} ptn_account_totals;

extern ptn_account_totals ptn_totals;

/* The account a new block is counted in: nobody's for NULL and for a destroyed one. */
ptn_account *ptn_account_resolve(ptn_account *account);
/* Bytes missing under the limit for a block of bytes more; 0 when it fits. */
uint64_t ptn_account_missing(const ptn_account *account, uint64_t bytes);
/* The budget that a refusal names which would need so much. */
uint64_t ptn_account_named(const ptn_account *account, uint64_t needed_bytes);
/* Bytes by which a block of bytes more would pass the goal; 0 where it does not or there is none. */
uint64_t ptn_account_beyond_goal(const ptn_account *account, uint64_t bytes);
void ptn_account_count(ptn_account *account, uint64_t bytes);
void ptn_account_uncount(ptn_account *account, uint64_t bytes);
void ptn_account_add_charge(ptn_account *account, uint64_t bytes); /* there is room */
/* A call of the account's pressure, which comes without the lock between the two; its context is there until the second. */
typedef struct ptn_asking {
  ptn_account *account;
  struct ptn_asking *outer; /* of this thread */
} ptn_asking;
void ptn_asking_begin(ptn_asking *asking, ptn_account *account);
void ptn_asking_end(ptn_asking *asking);
/* What may be resident: see arena.h. Never below what is live. */
uint64_t ptn_resident_ceiling(void);
bool ptn_accounts_hold(void); /* the invariants of account.c */
void ptn_arena_settle(void);  /* of arena.c: purges what is resident above the ceiling, after the ceiling may have fallen */
void ptn_accounts_after_fork(void); /* in the child: no account is in use, no pressure is asked */

#endif
