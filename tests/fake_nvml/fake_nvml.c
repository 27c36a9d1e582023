/* A stand-in for the NVIDIA driver library, scripted by the text file that $FAKE_NVML_STATE names. It is read again for
 * every call, so a test changes the machine by replacing the file:
 *
 *   init=9                    nvmlInit fails with that nvmlReturn_t
 *   count=2                   number of GPUs
 *   gpu0.uuid=GPU-a           a value; a key that is missing means NOT_SUPPORTED
 *   gpu0.power_mw=!999        the call fails with that nvmlReturn_t
 *   gpu0.gone=15              every call on this GPU fails with it
 *   gpu0.delay_ms=500         every call on this GPU takes that long
 *
 * Without the variable or the file there is no driver (DRIVER_NOT_LOADED).
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, VERSION_MISMATCH = 25 };
enum { MAX_GPUS = 16, MAX_VALUE = 96 };

struct gpu { int index; };
static struct gpu gpus[MAX_GPUS];
static int initialized;

static int look_up(const char *key, char *value) {
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    int result = NOT_SUPPORTED;
    size_t length = strlen(key);
    if (!file) return DRIVER_NOT_LOADED;
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, key, length) || line[length] != '=') continue;
        line[strcspn(line, "\r\n")] = 0;
        if (line[length + 1] == '!') {
            result = atoi(line + length + 2);
        } else {
            snprintf(value, MAX_VALUE, "%.*s", MAX_VALUE - 1, line + length + 1);
            result = SUCCESS;
        }
    }
    fclose(file);
    return result;
}

static int gpu_text(const struct gpu *gpu, const char *key, char *value) {
    char full[64];
    if (!initialized) return UNINITIALIZED;
    snprintf(full, sizeof full, "gpu%d.delay_ms", gpu->index);
    if (look_up(full, value) == SUCCESS) usleep(atoi(value) * 1000);
    snprintf(full, sizeof full, "gpu%d.gone", gpu->index);
    if (look_up(full, value) == SUCCESS) return atoi(value);
    snprintf(full, sizeof full, "gpu%d.%s", gpu->index, key);
    return look_up(full, value);
}

static int gpu_number(const struct gpu *gpu, const char *key, u64 *number) {
    char value[MAX_VALUE];
    int result = gpu_text(gpu, key, value);
    if (result == SUCCESS) *number = strtoull(value, NULL, 10);
    return result;
}

static int gpu_unsigned(const struct gpu *gpu, const char *key, unsigned *number) {
    u64 wide = 0;
    int result = gpu_number(gpu, key, &wide);
    if (result == SUCCESS) *number = (unsigned)wide;
    return result;
}

static int gpu_string(const struct gpu *gpu, const char *key, char *text, unsigned size) {
    char value[MAX_VALUE];
    int result = gpu_text(gpu, key, value);
    if (result == SUCCESS) snprintf(text, size, "%s", value);
    return result;
}

static int num_gpus(void) {
    char value[MAX_VALUE];
    return look_up("count", value) == SUCCESS ? atoi(value) : 0;
}

int nvmlInitWithFlags(unsigned flags) {
    char value[MAX_VALUE];
    int result = look_up("init", value);
    (void)flags;
    if (result == SUCCESS) return atoi(value);
    if (result == DRIVER_NOT_LOADED) return result;
    for (int i = 0; i < MAX_GPUS; i++) gpus[i].index = i;
    initialized = 1;
    return SUCCESS;
}

int nvmlShutdown(void) {
    int result = initialized ? SUCCESS : UNINITIALIZED;
    initialized = 0;
    return result;
}

const char *nvmlErrorString(int result) {
    static __thread char text[32];
    snprintf(text, sizeof text, "fake NVML error %d", result);
    return text;
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    char value[MAX_VALUE];
    int result = initialized ? look_up("driver", value) : UNINITIALIZED;
    if (result == SUCCESS) snprintf(text, size, "%s", value);
    return result;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)num_gpus();
    return initialized ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **gpu) {
    char value[MAX_VALUE];
    if (!initialized) return UNINITIALIZED;
    if (index >= MAX_GPUS || (int)index >= num_gpus()) return INVALID_ARGUMENT;
    *gpu = &gpus[index];
    return gpu_text(*gpu, "uuid", value);
}

int nvmlDeviceGetUUID(struct gpu *gpu, char *text, unsigned size) { return gpu_string(gpu, "uuid", text, size); }
int nvmlDeviceGetName(struct gpu *gpu, char *text, unsigned size) { return gpu_string(gpu, "name", text, size); }
int nvmlDeviceGetPowerUsage(struct gpu *gpu, unsigned *mw) { return gpu_unsigned(gpu, "power_mw", mw); }
int nvmlDeviceGetEnforcedPowerLimit(struct gpu *gpu, unsigned *mw) { return gpu_unsigned(gpu, "power_limit_mw", mw); }
int nvmlDeviceGetTotalEnergyConsumption(struct gpu *gpu, u64 *mj) { return gpu_number(gpu, "energy_mj", mj); }

int nvmlDeviceGetUtilizationRates(struct gpu *gpu, unsigned rates[2]) {
    int result = gpu_unsigned(gpu, "utilization_percent", &rates[0]);
    return result ? result : gpu_unsigned(gpu, "memory_utilization_percent", &rates[1]);
}

struct memory { unsigned version; u64 total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo_v2(struct gpu *gpu, struct memory *memory) {
    int result;
    if (memory->version != (sizeof *memory | 2u << 24)) return VERSION_MISMATCH;
    if ((result = gpu_number(gpu, "memory_total_bytes", &memory->total))) return result;
    if ((result = gpu_number(gpu, "memory_reserved_bytes", &memory->reserved))) return result;
    if ((result = gpu_number(gpu, "memory_used_bytes", &memory->used))) return result;
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

struct temperature { unsigned version, sensor; int celsius; };

int nvmlDeviceGetTemperatureV(struct gpu *gpu, struct temperature *temperature) {
    unsigned celsius = 0;
    int result;
    if (temperature->version != (sizeof *temperature | 1u << 24)) return VERSION_MISMATCH;
    result = gpu_unsigned(gpu, "temperature_c", &celsius);
    if (result == SUCCESS) temperature->celsius = (int)celsius;
    return result;
}

int nvmlDeviceGetClockInfo(struct gpu *gpu, unsigned clock, unsigned *mhz) {
    static const char *const keys[] = {"graphics_clock_mhz", "sm_clock_mhz", "memory_clock_mhz", "video_clock_mhz"};
    return clock < 4 ? gpu_unsigned(gpu, keys[clock], mhz) : INVALID_ARGUMENT;
}
