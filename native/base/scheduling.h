// What a thread asks of the kernel's scheduler, and what it is given. Used by the context for its driver.
#pragma once

namespace ringtrain {

// Cores that this thread may run on.
int UsableCores();

// Lets the calling thread run soon after it wakes, beside threads that compute: its timers are exact, and its slices
// short, so that it need not wait for the end of another thread's. Linux heeds the latter from 6.12 on; no privilege is
// needed.
void RunPromptly();

}  // namespace ringtrain
