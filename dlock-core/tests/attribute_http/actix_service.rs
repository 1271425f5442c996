//! The handlers return an error of their own, or map the lock's with `on_error`.

use std::net::SocketAddr;

use actix_web::http::StatusCode;
use actix_web::http::header::RETRY_AFTER;
use actix_web::web::{Data, Path};
use actix_web::{App as Actix, HttpResponse, HttpServer, ResponseError, get};
use dlock::{Error, ErrorKind, distributed_lock};

use crate::{App, Fixture};

#[derive(Debug)]
struct Failure(Error);

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure(error)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.0.kind())
    }
}

impl ResponseError for Failure {
    fn status_code(&self) -> StatusCode {
        match self.0.kind() {
            ErrorKind::TimedOut => StatusCode::CONFLICT,
            ErrorKind::Unavailable | ErrorKind::Unknown => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn error_response(&self) -> HttpResponse {
        let mut response = HttpResponse::build(self.status_code());
        if self.status_code() == StatusCode::SERVICE_UNAVAILABLE {
            response.insert_header((RETRY_AFTER, "1"));
        }
        response.body(self.to_string())
    }
}

#[get("/orders/{order}")]
#[distributed_lock(key = "order:{order}", client = app.dlock, guard = lock)]
async fn book(app: Data<App>, order: Path<usize>) -> Result<String, Failure> {
    let not_send = std::rc::Rc::new(*order); // handlers of actix-web stay on their thread
    Ok(app.book(*not_send, lock).await)
}

#[distributed_lock(key = "order:{order}", wait = "0s", client = app.dlock)]
#[get("/busy/{order}")]
async fn busy(app: Data<App>, order: Path<usize>) -> Result<String, Failure> {
    Ok(order.to_string())
}

#[get("/long/{id}")]
#[distributed_lock(key = "order:{id}", client = app.dlock, on_error = |error| Failure(error).error_response())]
async fn long(app: Data<App>, id: Path<String>) -> HttpResponse {
    HttpResponse::Ok().body(id.into_inner())
}

#[get("/stuck/{order}")]
#[distributed_lock(key = "order:{order}", client = app.dlock)]
async fn stuck(app: Data<App>, order: Path<usize>) -> Result<String, Failure> {
    std::future::pending::<()>().await;
    Ok(order.to_string())
}

fn serve(app: App) -> SocketAddr {
    let app = Data::new(app);
    let factory = move || {
        Actix::new().app_data(app.clone()).service(book).service(busy).service(long).service(stuck)
    };
    let server = HttpServer::new(factory).workers(2).disable_signals().bind(("127.0.0.1", 0));
    let server = server.expect("a port");
    let address = server.addrs()[0];
    actix_web::rt::spawn(server.run());
    address
}

async fn under_load(fixture: Fixture) {
    let [one, two] = fixture.apps.clone();
    let services = [serve(one), serve(two)];
    fixture.storm(services).await;
    fixture.refusals(services[0]).await;
}

#[actix_web::test]
async fn memory() {
    under_load(Fixture::memory()).await;
}

#[actix_web::test]
async fn redis() {
    if let Some(fixture) = Fixture::redis() {
        under_load(fixture).await;
    }
}
