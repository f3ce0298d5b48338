/* The thread's error record: see status.h. Message text is complete in itself: it names what was asked and what to do. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local ptn_error record;

ptn_error *ptn_last_error(void) { return &record; }

static ptn_status write_record(ptn_status code, const char *format, va_list arguments) {
  memset(&record, 0, sizeof record);
  record.code = code;
  vsnprintf(record.message, sizeof record.message, format, arguments);
  return code;
}

ptn_status ptn_fail(ptn_status code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_record(code, format, arguments);
  va_end(arguments);
  return code;
}

ptn_status ptn_fail_disk(int sys_errno, const char *path, uint64_t asked_bytes, const char *what) {
  const char *where = path ? path : "";
  ptn_fail(PTN_DISK, "%s of %llu bytes failed: %s: %s", what, (unsigned long long)asked_bytes, strerror(sys_errno), where);
  record.sys_errno = sys_errno;
  record.asked_bytes = asked_bytes;
  snprintf(record.path, sizeof record.path, "%s", where);
  return PTN_DISK;
}

ptn_status ptn_fail_budget(uint64_t needed_bytes, uint64_t budget_bytes, uint64_t smallest_bytes, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_record(PTN_BUDGET, format, arguments);
  va_end(arguments);
  record.needed_bytes = needed_bytes;
  record.budget_bytes = budget_bytes;
  record.smallest_bytes = smallest_bytes;
  return PTN_BUDGET;
}

void ptn_error_save(ptn_error *to) { *to = record; }

ptn_status ptn_error_restore(const ptn_error *from) {
  record = *from;
  return from->code;
}

void ptn_error_of(ptn_error *error, const char *format, ...) {
  char message[sizeof error->message], of[64];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(of, sizeof of, format, arguments);
  va_end(arguments);
  memcpy(message, error->message, sizeof message);
  int most = (int)(sizeof message - sizeof of - 2);
  snprintf(error->message, sizeof error->message, "%s: %.*s", of, most, message);
}
