// Randomness by seed: every draw is a function of the seed and of what is drawn for, never of which thread came first.
#include "fake_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const NAMES[FAULT_COUNT] = {
    "out_of_memory", "launch_failure", "refused_export", "refused_registration", "ignored_hint", "device_lost",
    "refused_values",
};

static struct {
    double probability;
    uint64_t at; // 0 = none
    uint64_t chances;
} plans[FAULT_COUNT];

static uint64_t mix(uint64_t value) { // splitmix64
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

uint64_t draw(uint64_t purpose, uint64_t first, uint64_t second) {
    return mix(mix(mix(mix(settings.seed) ^ purpose) ^ first) ^ second);
}

// "out_of_memory=0.01,launch_failure=@5": with a probability, or at the fifth chance and never else.
bool faults_read(const char *text) {
    char copy[512];
    char *rest = copy;
    memset(plans, 0, sizeof plans);
    if (snprintf(copy, sizeof copy, "%s", text) >= (int)sizeof copy) return false;
    for (char *item; (item = strsep(&rest, ",")) != NULL;) {
        if (*item == '\0') continue;
        char *value = strchr(item, '=');
        int fault = 0;
        if (value == NULL) return false;
        *value++ = '\0';
        while (fault < FAULT_COUNT && strcmp(NAMES[fault], item) != 0) fault++;
        if (fault == FAULT_COUNT || *value == '\0') return false;
        char *end = NULL;
        if (*value == '@') plans[fault].at = strtoull(value + 1, &end, 10);
        else plans[fault].probability = strtod(value, &end);
        if (*end != '\0') return false;
    }
    return true;
}

bool fault_strikes(Fault fault) {
    uint64_t chance = ++plans[fault].chances;
    if (plans[fault].at != 0) return chance == plans[fault].at;
    return (double)(draw(fault, chance, 0) >> 11) * 0x1.0p-53 < plans[fault].probability;
}
