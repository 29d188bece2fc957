#include "ember_io.h"
