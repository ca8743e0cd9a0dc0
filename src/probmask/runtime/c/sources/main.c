/* Run the network on raw numbers: read inputs from stdin until it ends, write outputs to stdout. */
#include <stdio.h>

#include "network.h"

$BUFFERS

struct tensor {
    void *data;
    size_t size; /* in numbers of four bytes */
};

int main(void) {
    const struct tensor inputs[] = {$INPUTS};
    const struct tensor outputs[] = {$OUTPUTS};
    const size_t input_count = sizeof inputs / sizeof *inputs;
    const size_t output_count = sizeof outputs / sizeof *outputs;
    for (;;) {
        for (size_t i = 0; i < input_count; ++i) {
            const size_t found = fread(inputs[i].data, 4, inputs[i].size, stdin);
            if (i == 0 && found == 0 && feof(stdin)) return 0;
            if (found < inputs[i].size) {
                fprintf(stderr, "stdin ends within an input: expected %lu numbers, found %lu\n",
                        (unsigned long)inputs[i].size, (unsigned long)found);
                return 1;
            }
        }
        run($ARGUMENTS);
        for (size_t i = 0; i < output_count; ++i)
            if (fwrite(outputs[i].data, 4, outputs[i].size, stdout) < outputs[i].size) {
                fprintf(stderr, "cannot write to stdout\n");
                return 1;
            }
    }
}
