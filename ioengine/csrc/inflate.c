#include "ember_io.h"

int ember_io_version(void)
{
	return 1;
}
