use dlock::key;

struct User {
    id: u64,
}

fn main() {
    let (shop, user) = (1, User { id: 23 });
    let _ = key!("cart:{shop}{user.id}");
    let _ = key!("cart:{shop}-{user.id}");
    let _ = key!("cart:{shop}%{user.id}");
}
