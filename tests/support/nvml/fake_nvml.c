/* A libnvidia-ml.so.1 that answers from a text file, read anew at each call, so that a test can break a GPU
 * between two checks. Lines are "key value": "gpus 2", "init 9", "0.uuid GPU-a", "0.pcie_gen 4",
 * "0.error.nvmlDeviceGetUUID 15", "0.error.* 15". A key that is missing: the GPU does not support it (3). */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK 0
#define UNINITIALIZED 1
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define INSUFFICIENT_SIZE 7
#define VERSION_MISMATCH 25

static char answers_path[4096];
static int is_open;

void fake_nvml_answers(const char *path) { snprintf(answers_path, sizeof answers_path, "%s", path); }

/* 1 where the key has a value. */
static int find(const char *key, char *value, size_t size) {
    const char *from_environment = getenv("FAKE_NVML_ANSWERS");
    FILE *file = fopen(answers_path[0] || !from_environment ? answers_path : from_environment, "r");
    char line[512];
    int found = 0;
    if (!file) return 0;
    while (!found && fgets(line, sizeof line, file)) {
        char *blank = strchr(line, ' ');
        line[strcspn(line, "\n")] = 0;
        if (!blank) continue;
        *blank = 0;
        if (strcmp(line, key) == 0) {
            snprintf(value, size, "%s", blank + 1);
            found = 1;
        }
    }
    fclose(file);
    return found;
}

static int number(const char *key, unsigned long long *value) {
    char text[256];
    if (!find(key, text, sizeof text)) return 0;
    *value = strtoull(text, NULL, 0);
    return 1;
}

static int failure(int gpu, const char *function) {
    char key[256];
    unsigned long long code;
    if (!is_open) return UNINITIALIZED;
    snprintf(key, sizeof key, "%d.error.%s", gpu, function);
    if (number(key, &code)) return (int)code;
    snprintf(key, sizeof key, "%d.error.*", gpu);
    return number(key, &code) ? (int)code : OK;
}

static int index_of(void *device) { return (int)(intptr_t)device - 1; }

static int ask(void *device, const char *function, const char *name, unsigned long long *value) {
    char key[256];
    int code = failure(index_of(device), function);
    if (code) return code;
    snprintf(key, sizeof key, "%d.%s", index_of(device), name);
    return number(key, value) ? OK : NOT_SUPPORTED;
}

static int ask_text(void *device, const char *function, const char *name, char *value, unsigned size) {
    char key[256];
    int code = failure(index_of(device), function);
    if (code) return code;
    snprintf(key, sizeof key, "%d.%s", index_of(device), name);
    return find(key, value, size) ? OK : NOT_SUPPORTED;
}

int nvmlInitWithFlags(unsigned flags) {
    unsigned long long code = 0;
    (void)flags;
    number("init", &code);
    is_open = code == 0;
    return (int)code;
}

int nvmlShutdown(void) {
    int was_open = is_open;
    is_open = 0;
    return was_open ? OK : UNINITIALIZED;
}

const char *nvmlErrorString(int code) {
    switch (code) {
        case 3: return "Not Supported";
        case 15: return "GPU is lost";
        case 18: return "Driver/library version mismatch";
        default: return "Some Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    unsigned long long value = 0;
    int code = failure(-1, "nvmlDeviceGetCount_v2");
    if (code) return code;
    number("gpus", &value);
    *count = (unsigned)value;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    int code = failure((int)index, "nvmlDeviceGetHandleByIndex_v2");
    if (code) return code;
    *device = (void *)(intptr_t)(index + 1);
    return OK;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
    return ask_text(device, "nvmlDeviceGetUUID", "uuid", uuid, size);
}

int nvmlDeviceGetName(void *device, char *name, unsigned size) {
    return ask_text(device, "nvmlDeviceGetName", "name", name, size);
}

struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(void *device, struct pci_info *info) {
    return ask_text(device, "nvmlDeviceGetPciInfo_v3", "pci_bus_id", info->bus_id, sizeof info->bus_id);
}

/* One number of an unsigned int. */
#define UINT(function, name)                                     \
    int function(void *device, unsigned *value) {                \
        unsigned long long found = 0;                            \
        int code = ask(device, #function, name, &found);         \
        if (code == OK) *value = (unsigned)found;                \
        return code;                                             \
    }

UINT(nvmlDeviceGetPowerUsage, "power_mw")
UINT(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")
UINT(nvmlDeviceGetPowerManagementDefaultLimit, "power_limit_default_mw")
UINT(nvmlDeviceGetPerformanceState, "pstate")
UINT(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen")
UINT(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_gen_max")
UINT(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
UINT(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max")
UINT(nvmlDeviceGetPcieReplayCounter, "pcie_replays")
UINT(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pages_pending")

/* One number that a second argument chooses: its name has "/argument" behind it. */
static int ask_of(void *device, const char *function, const char *name, unsigned which, unsigned *value) {
    char key[128];
    unsigned long long found = 0;
    int code;
    snprintf(key, sizeof key, "%s/%u", name, which);
    code = ask(device, function, key, &found);
    if (code == OK) *value = (unsigned)found;
    return code;
}

#define UINT_OF(function, name)                                          \
    int function(void *device, unsigned which, unsigned *value) {        \
        return ask_of(device, #function, name, which, value);            \
    }

UINT_OF(nvmlDeviceGetTemperatureThreshold, "temperature_threshold")
UINT_OF(nvmlDeviceGetTemperature, "temperature_old")
UINT_OF(nvmlDeviceGetClockInfo, "clock")
UINT_OF(nvmlDeviceGetMaxClockInfo, "clock_max")
UINT_OF(nvmlDeviceGetNvLinkState, "nvlink_active")

struct temperature {
    unsigned version, sensor;
    int celsius;
};

int nvmlDeviceGetTemperatureV(void *device, struct temperature *temperature) {
    unsigned value = 0;
    int code;
    if (temperature->version != (sizeof *temperature | 1u << 24)) return VERSION_MISMATCH;
    code = ask_of(device, "nvmlDeviceGetTemperatureV", "temperature", temperature->sensor, &value);
    if (code == OK) temperature->celsius = (int)value;
    return code;
}

struct margin {
    unsigned version;
    int celsius;
};

int nvmlDeviceGetMarginTemperature(void *device, struct margin *margin) {
    unsigned long long value = 0;
    int code;
    if (margin->version != (sizeof *margin | 1u << 24)) return VERSION_MISMATCH;
    code = ask(device, "nvmlDeviceGetMarginTemperature", "temperature_margin", &value);
    if (code == OK) margin->celsius = (int)value;
    return code;
}

int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
    return ask(device, "nvmlDeviceGetCurrentClocksEventReasons", "clocks_event_reasons", reasons);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    return ask(device, "nvmlDeviceGetCurrentClocksThrottleReasons", "clocks_throttle_reasons", reasons);
}

/* ecc/<0 corrected, 1 uncorrected>/<0 volatile, 1 aggregate> */
int nvmlDeviceGetTotalEccErrors(void *device, unsigned kind, unsigned span, unsigned long long *count) {
    char name[64];
    snprintf(name, sizeof name, "ecc/%u/%u", kind, span);
    return ask(device, "nvmlDeviceGetTotalEccErrors", name, count);
}

int nvmlDeviceGetMemoryErrorCounter(void *device, unsigned kind, unsigned span, unsigned place,
                                    unsigned long long *count) {
    char name[64];
    snprintf(name, sizeof name, "ecc/%u/%u/%u", kind, span, place);
    return ask(device, "nvmlDeviceGetMemoryErrorCounter", name, count);
}

int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failed) {
    char text[256];
    int code = ask_text(device, "nvmlDeviceGetRemappedRows", "remapped_rows", text, sizeof text);
    if (code) return code;
    return sscanf(text, "%u %u %u %u", corrected, uncorrected, pending, failed) == 4 ? OK : INVALID_ARGUMENT;
}

int nvmlDeviceGetRetiredPages(void *device, unsigned cause, unsigned *count, unsigned long long *pages) {
    unsigned n_pages = 0;
    int code = ask_of(device, "nvmlDeviceGetRetiredPages", "retired_pages", cause, &n_pages);
    unsigned room = *count;
    if (code) return code;
    *count = n_pages;
    if (!pages) return n_pages ? INSUFFICIENT_SIZE : OK;
    if (room < n_pages) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < n_pages; i++) pages[i] = 0x1000ull * (i + 1);
    return OK;
}

int nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned link, unsigned counter, unsigned long long *count) {
    char name[64];
    snprintf(name, sizeof name, "nvlink_errors/%u/%u", link, counter);
    return ask(device, "nvmlDeviceGetNvLinkErrorCounter", name, count);
}

struct field_value {
    uint32_t field, scope;
    int64_t timestamp, latency_us;
    uint32_t value_type, result;
    union {
        double as_double;
        unsigned as_uint;
        unsigned long long as_ulonglong;
    } value;
};

/* field/<id>/<scope>: an unsigned int (type 1), or with "big" in front an unsigned long long (type 3). */
int nvmlDeviceGetFieldValues(void *device, int count, struct field_value *values) {
    int code = failure(index_of(device), "nvmlDeviceGetFieldValues");
    if (code) return code;
    for (int i = 0; i < count; i++) {
        char key[64], text[256];
        snprintf(key, sizeof key, "field/%u/%u", values[i].field, values[i].scope);
        values[i].result =
            (uint32_t)ask_text(device, "nvmlDeviceGetFieldValues", key, text, sizeof text);
        if (values[i].result) continue;
        if (strncmp(text, "big ", 4) == 0) {
            values[i].value_type = 3;
            values[i].value.as_ulonglong = strtoull(text + 4, NULL, 0);
        } else {
            values[i].value_type = 1;
            values[i].value.as_uint = (unsigned)strtoul(text, NULL, 0);
        }
    }
    return OK;
}

struct process_info {
    unsigned pid;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
};

/* processes: "pid bytes pid bytes ..." */
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process_info *processes) {
    char text[256], *rest = text;
    unsigned room = *count, n = 0;
    int code = ask_text(device, "nvmlDeviceGetComputeRunningProcesses_v3", "processes", text, sizeof text);
    if (code) return code;
    for (;;) {
        char *end;
        unsigned long pid = strtoul(rest, &end, 10);
        if (end == rest) break;
        unsigned long long used = strtoull(end, &rest, 10);
        if (processes && n < room) processes[n] = (struct process_info){(unsigned)pid, used, ~0u, ~0u};
        n++;
    }
    *count = n;
    return n > room || (!processes && n) ? INSUFFICIENT_SIZE : OK;
}
