// How a hello travels over a socket that does not block.
#ifndef RINGTRAIN_TRANSPORT_TCP_TALK_H_
#define RINGTRAIN_TRANSPORT_TCP_TALK_H_

#include "transport/tcp/hello.h"
#include "transport/tcp/socket.h"

namespace ringtrain {

// False, with errno, if the kernel gives none.
bool Draw(Nonce* nonce);
// Reads what the hello wants and sends what it says. False if the connection has ended; *error tells how.
bool Converse(const Socket& socket, Hello* hello, int* error);

}  // namespace ringtrain
#endif  // RINGTRAIN_TRANSPORT_TCP_TALK_H_
