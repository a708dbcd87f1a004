#include "transport/tcp/talk.h"

#include <errno.h>
#include <sys/random.h>

#include <algorithm>
#include <string>

namespace ringtrain {

bool Draw(Nonce* nonce) { return getrandom(nonce->data(), nonce->size(), 0) == static_cast<ssize_t>(nonce->size()); }

bool Converse(const Socket& socket, Hello* hello, int* error) {
  *error = 0;
  for (;;) {
    const std::string said = hello->Say();  // some dozen bytes into an empty socket: they fit
    const ssize_t sent =
        said.empty() ? 0 : Uninterrupted([&] { return send(socket.fd(), said.data(), said.size(), MSG_NOSIGNAL); });
    if (sent != static_cast<ssize_t>(said.size())) return *error = errno, false;
    uint8_t heard[Hello::kMostBytes];
    const size_t wanted = std::min(hello->wanted(), sizeof heard);
    if (wanted == 0) return true;
    const ssize_t got = Uninterrupted([&] { return recv(socket.fd(), heard, wanted, 0); });
    if (got < 0 && errno == EAGAIN) return true;
    if (got <= 0) return *error = got < 0 ? errno : 0, false;
    hello->Hear(heard, static_cast<size_t>(got));
  }
}

}  // namespace ringtrain
