// The trace: one JSON object a line, one write a line, so that lines of several processes never mix.
#include "fake_cuda.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int trace_file = -1;

void trace_open(const char *path) {
    trace_file = path == NULL ? -1 : open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

bool trace_is_on(void) { return trace_file >= 0; }

// Rules are texts of this driver; a quote in one of them would break the line.
static void without_quotes(const char *text, char *safe, size_t room) {
    size_t length = 0;
    for (; *text != '\0' && length + 1 < room; text++)
        if (*text != '"' && *text != '\\' && (unsigned char)*text >= ' ') safe[length++] = *text;
    safe[length] = '\0';
}

static void write_line(const char *kind, const char *name, CUstream stream, CUresult result, const char *rule,
                       const char *arguments) {
    char line[2048], safe[512];
    without_quotes(rule, safe, sizeof safe);
    int length =
        snprintf(line, sizeof line,
                 "{\"order\":%llu,\"process\":%d,\"thread\":%ld,\"kind\":\"%s\",\"name\":\"%s\",\"stream\":%llu,"
                 "\"result\":\"%s\",\"rule\":\"%s\",\"arguments\":{%s}}\n",
                 (unsigned long long)next_order(), getpid(), syscall(SYS_gettid), kind, name,
                 (unsigned long long)(uintptr_t)stream, error_name(result), safe, arguments);
    if (length >= (int)sizeof line) length = snprintf(line, sizeof line, "{\"cut\":\"%s\"}\n", name);
    if (write(trace_file, line, (size_t)length) != length) {
        fprintf(stderr, "fake cuda: the trace is not complete: a line could not be written\n");
        trace_file = -1;
    }
}

void trace_call(const char *name, CUstream stream, CUresult result, const char *rule, const char *arguments) {
    if (trace_file >= 0) write_line("call", name, stream, result, rule, arguments);
}

void trace_ran(const char *operation, CUstream stream, uint64_t sequence, CUresult result, const char *arguments) {
    char words[1024];
    if (trace_file < 0) return;
    snprintf(words, sizeof words, "\"sequence\":%llu%s%s", (unsigned long long)sequence, *arguments ? "," : "",
             arguments);
    write_line("ran", operation, stream, result, rule_taken(), words);
}
