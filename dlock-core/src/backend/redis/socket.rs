//! A TCP or unix socket that is connected to a server, without TLS.
//!
//! It belongs to no runtime: any thread writes to it, and whoever reads it registers it
//! in a runtime for as long as it does.

use std::io::{self, Read as _, Write as _};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, RedisResult};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;

/// A connected socket that does not block, in no runtime.
pub(super) enum Socket {
    Tcp(std::net::TcpStream),
    #[cfg(unix)]
    Unix(std::os::unix::net::UnixStream),
}

/// Does the same to whatever kind of socket it is.
macro_rules! each {
    ($kind:ident, $it:expr, $socket:ident => $what:expr) => {
        match $it {
            $kind::Tcp($socket) => $what,
            #[cfg(unix)]
            $kind::Unix($socket) => $what,
        }
    };
}

impl Socket {
    /// Connects and makes the connection ready for commands, as the user and in the
    /// database that the server's address says. `None` if there is TLS in between.
    pub(super) async fn connect(info: &ConnectionInfo) -> RedisResult<Option<Self>> {
        let socket = match info.addr() {
            ConnectionAddr::Tcp(host, port) => {
                let socket = TcpStream::connect((host.as_str(), *port)).await?;
                configure(&socket, info.tcp_settings())?;
                Readable::Tcp(socket)
            }
            #[cfg(unix)]
            ConnectionAddr::Unix(path) => Readable::Unix(UnixStream::connect(path).await?),
            _ => return Ok(None),
        };
        let socket = Arc::new(socket);
        // All its requests are answered when this returns, so nothing is left in its
        // buffers.
        let config = AsyncConnectionConfig::new().set_response_timeout(None);
        let lent = Lent(socket.clone());
        let lent =
            MultiplexedConnection::new_with_config(info.redis_settings(), lent, config).await?;
        drop(lent);
        match Arc::try_unwrap(socket) {
            Ok(Readable::Tcp(socket)) => Ok(Some(Socket::Tcp(socket.into_std()?))),
            #[cfg(unix)]
            Ok(Readable::Unix(socket)) => Ok(Some(Socket::Unix(socket.into_std()?))),
            Err(_) => Err(io::Error::other("the socket is still in use").into()),
        }
    }

    /// Writes as much as the socket takes at once.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        each!(Socket, self, socket => (&mut &*socket).write(bytes))
    }

    /// Reads what there is, from any thread.
    pub(super) fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        each!(Socket, self, socket => (&mut &*socket).read(bytes))
    }

    /// The same socket, for reading in this runtime. Panics in a runtime without IO.
    pub(super) fn readable(&self) -> io::Result<Readable> {
        match self {
            Socket::Tcp(socket) => Ok(Readable::Tcp(TcpStream::from_std(socket.try_clone()?)?)),
            #[cfg(unix)]
            Socket::Unix(socket) => Ok(Readable::Unix(UnixStream::from_std(socket.try_clone()?)?)),
        }
    }

    /// Ends the connection, for everybody who has this socket.
    pub(super) fn shutdown(&self) {
        // It may have ended already.
        let _ = each!(Socket, self, socket => socket.shutdown(std::net::Shutdown::Both));
    }
}

fn configure(socket: &TcpStream, settings: &TcpSettings) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let socket = SockRef::from(socket);
    if let Some(keepalive) = settings.keepalive() {
        socket.set_tcp_keepalive(keepalive)?;
    }
    #[cfg(any(target_os = "android", target_os = "fuchsia", target_os = "linux"))]
    if settings.user_timeout().is_some() {
        socket.set_tcp_user_timeout(settings.user_timeout())?;
    }
    Ok(())
}

/// A socket that is read in a runtime.
pub(super) enum Readable {
    Tcp(TcpStream),
    #[cfg(unix)]
    Unix(UnixStream),
}

impl Readable {
    pub(super) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(Readable, self, socket => Pin::new(socket).poll_read(cx, buffer))
    }
}

/// A socket for as long as the driver crate makes it ready.
struct Lent(Arc<Readable>);

impl AsyncRead for Lent {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        each!(Readable, &*self.0, socket => loop {
            ready!(socket.poll_read_ready(cx))?;
            match socket.try_read(buffer.initialize_unfilled()) {
                Ok(taken) => {
                    buffer.advance(taken);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        })
    }
}

impl AsyncWrite for Lent {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        each!(Readable, &*self.0, socket => loop {
            ready!(socket.poll_write_ready(cx))?;
            match socket.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
