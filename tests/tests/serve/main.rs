//! Servers: their control, limits, sandbox, guests, FUSE and vhost-user.

mod clean_ends;
mod come_and_go;
mod days;
mod fork_pushes;
mod forks;
mod fuse;
mod guest;
mod handed_over;
mod isolate;
mod left_writes;
mod limits;
mod locks;
mod memory_budget;
mod one_disk;
mod sandbox;
mod serve_control;
mod serve_load;
mod server_log;
mod service_manager;
mod stalled_kills;
mod stalls;
mod swapped_names;
mod threads;
mod top;
mod ublk;
mod vhost_user;
