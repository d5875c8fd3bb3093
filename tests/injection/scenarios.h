#pragma once

namespace moolink::injection {

class Report;

void calls_over_tcp(Report& report);
void calls_over_shm(Report& report);
void group_on_one_host(Report& report);
void group_on_two_hosts(Report& report);
void rounds_on_one_host(Report& report);
void rounds_on_two_hosts(Report& report);

}  // namespace moolink::injection
